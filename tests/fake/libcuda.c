/* A fake libcuda.so.1 for machines without a GPU: device memory is host memory, launches are logged and handed to a
 * callback. It is self-contained (no cuda.h), and stricter than it must be, so that misuse shows in a test. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef unsigned int u32;

#define API __attribute__((visibility("default"))) CUresult
#define MAX_DEVICES 16
#define MAX_ATTRIBUTES 256

static const struct { CUresult code; const char *name, *text; } ERRORS[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster misconfiguration"},
};
enum {
    INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, INVALID_CLUSTER_SIZE = 912,
};
enum { SM_COUNT = 16, SMEM_OPTIN = 97, CLUSTER_LAUNCH = 120 };           /* device attributes */
enum { MAX_DYNAMIC_SMEM = 8, NON_PORTABLE_CLUSTER = 14, FUNCTION_ATTRIBUTES = 16 }; /* function attributes */

typedef struct { int device, references; } Context;
typedef struct { u32 alive; char kind[4]; } Library;
typedef struct { Library *library; char entry[257]; } Kernel;
typedef struct Function { struct Function *next; Kernel *kernel; Context *context; int attributes[16]; } Function;
typedef struct Block { struct Block *next; char *start; size_t size; int device; } Block;
typedef struct Node { struct Node *next; char *launch; CUdeviceptr address; int byte; size_t count; } Node;
typedef struct { Node *first, **last; } Graph;
typedef struct { Graph *capture; } Stream;
typedef struct { double ms; int recorded; } Event;
typedef struct Sizes { struct Sizes *next; char entry[257]; int missing, count, sizes[64]; } Sizes;
typedef struct { u32 id, pad; union { char bytes[64]; u32 words[16]; } value; } Attribute;
typedef struct { u32 grid[3], block[3], smem; void *stream; Attribute *attributes; u32 count; } Config;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *journal;
static size_t journal_size, journal_room;
static int initialized, device_count, driver_version;
static int attributes[MAX_DEVICES][MAX_ATTRIBUTES];
static char names[MAX_DEVICES][64];
static Context primary[MAX_DEVICES];
static Function *functions;
static Block *blocks;
static Sizes *registered;
static struct { char function[64]; CUresult code; } failures[16];
static CUresult fault;
static void (*on_launch)(const char *line);
static __thread Context *stack[64];
static __thread int depth, capturing;

/* --- the journal and the switches that tests turn ------------------------------------------------------------- */

static void append(const char *text) {
    size_t size = strlen(text);
    if (journal_size + size + 1 > journal_room)
        journal = realloc(journal, journal_room = 2 * (journal_size + size + 1));
    memcpy(journal + journal_size, text, size + 1);
    journal_size += size;
}

/* Whether the function works in a context, which a fault on the device has made useless. */
static int touches_device(const char *function) {
    return strncmp(function, "cuD", 3) && (strncmp(function, "cuCtx", 5) || !strcmp(function, "cuCtxSynchronize"));
}

/* Logs a call with its JSON `format`ted arguments; gives the failure that a test ordered for it, else 0. */
static CUresult enter(const char *function, const char *format, ...) {
    char line[8192];
    va_list list;
    CUresult code = 0;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 16 && !code; i++)
        if (!strcmp(failures[i].function, function)) {
            code = failures[i].code;
            failures[i].function[0] = 0;
        }
    if (!code && touches_device(function)) code = fault;
    append("{\"call\": \"");
    append(function);
    append(*line ? "\", " : "\"");
    append(line);
    append("}\n");
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(...) do { CUresult e = enter(__VA_ARGS__); if (e) return e; if (!initialized) return NOT_INITIALIZED; } while (0)
#define NEED_CONTEXT() do { if (!depth) return INVALID_CONTEXT; } while (0)
#define NOT_IN_CAPTURE() do { if (capturing) return CAPTURE_UNSUPPORTED; } while (0)
#define NEED_DEVICE(device) do { if ((device) < 0 || (device) >= device_count) return INVALID_DEVICE; } while (0)

/* The journal so far; the caller frees it. */
__attribute__((visibility("default"))) char *fake_journal(void) {
    pthread_mutex_lock(&lock);
    char *copy = strdup(journal ? journal : "");
    pthread_mutex_unlock(&lock);
    return copy;
}

__attribute__((visibility("default"))) void fake_free(char *text) { free(text); }

__attribute__((visibility("default"))) void fake_clear(void) {
    pthread_mutex_lock(&lock);
    journal_size = 0;
    if (journal) *journal = 0;
    pthread_mutex_unlock(&lock);
}

__attribute__((visibility("default"))) void fake_configure(int devices, int version) {
    device_count = devices;
    driver_version = version;
}

__attribute__((visibility("default"))) void fake_device(int device, const char *name) {
    snprintf(names[device], sizeof names[device], "%s", name);
}

__attribute__((visibility("default"))) void fake_attribute(int device, int attribute, int value) {
    attributes[device][attribute] = value;
}

__attribute__((visibility("default"))) void fake_fail(const char *function, int code) {
    for (int i = 0; i < 16; i++)
        if (!failures[i].function[0]) {
            snprintf(failures[i].function, sizeof failures[i].function, "%s", function);
            failures[i].code = code;
            return;
        }
}

__attribute__((visibility("default"))) void fake_fault(int code) { fault = code; }

__attribute__((visibility("default"))) void fake_register(const char *entry, int missing, int count, const int *sizes) {
    Sizes *item = calloc(1, sizeof *item);
    snprintf(item->entry, sizeof item->entry, "%s", entry);
    item->missing = missing;
    item->count = count;
    memcpy(item->sizes, sizes, count * sizeof *sizes);
    item->next = registered;
    registered = item;
}

__attribute__((visibility("default"))) void fake_on_launch(void (*callback)(const char *line)) { on_launch = callback; }

/* Handles (libraries, kernels, streams) are leaked on purpose: an old one must fail, not crash. */
__attribute__((visibility("default"))) void fake_reset(void) {
    fake_clear();
    depth = capturing = 0;
    on_launch = NULL;
    fault = 0;
    registered = NULL;
    memset(failures, 0, sizeof failures);
    memset(attributes, 0, sizeof attributes);
    for (int i = 0; i < MAX_DEVICES; i++) primary[i] = (Context){i, 0};
    while (blocks) {
        Block *block = blocks;
        blocks = block->next;
        free(block->start);
        free(block);
    }
}

static Sizes *find(const char *entry) {
    Sizes *item = registered;
    while (item && strcmp(item->entry, entry)) item = item->next;
    return item;
}

/* --- initialization, errors, devices, contexts ------------------------------------------------------------------ */

API cuInit(u32 flags) {
    CUresult code = enter("cuInit", "\"flags\": %u", flags);
    if (code) return code;
    if (!device_count) return NO_DEVICE;
    initialized = 1;
    return 0;
}

API cuGetErrorName(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == error) return *text = ERRORS[i].name, 0;
    return *text = NULL, INVALID_VALUE;
}

API cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == error) return *text = ERRORS[i].text, 0;
    return *text = NULL, INVALID_VALUE;
}

/* Only one version of each function is exported, so a name leads to it with or without its suffix. */
static CUresult lookup(const char *symbol, void **function) {
    static void *self;
    char name[128];
    if (!self) {
        Dl_info info;
        dladdr((void *)lookup, &info);
        self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    if (!strcmp(symbol, "cuGraphInstantiate")) symbol = "cuGraphInstantiateWithFlags";
    snprintf(name, sizeof name, "%s_v2", symbol);
    *function = dlsym(self, name);
    if (!*function) *function = dlsym(self, symbol);
    return *function ? 0 : NOT_FOUND;
}

API cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags) {
    (void)version, (void)flags;
    return lookup(symbol, function);
}

API cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    CUresult code = cuGetProcAddress(symbol, function, version, flags);
    if (status) *status = code ? 1 : 0;
    return code;
}

API cuDriverGetVersion(int *version) {
    CUresult code = enter("cuDriverGetVersion", "");
    *version = driver_version;
    return code;
}

API cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount", "");
    *count = device_count;
    return 0;
}

API cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER("cuDeviceGet", "\"device\": %d", ordinal);
    NEED_DEVICE(ordinal);
    *device = ordinal;
    return 0;
}

API cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER("cuDeviceGetName", "\"device\": %d", device);
    NEED_DEVICE(device);
    snprintf(name, length, "%s", names[device]);
    return 0;
}

API cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER("cuDeviceGetAttribute", "\"device\": %d, \"attribute\": %d", device, attribute);
    NEED_DEVICE(device);
    if (attribute < 0 || attribute >= MAX_ATTRIBUTES) return INVALID_VALUE;
    *value = attributes[device][attribute];
    return 0;
}

API cuDevicePrimaryCtxRetain(Context **context, CUdevice device) {
    ENTER("cuDevicePrimaryCtxRetain", "\"device\": %d", device);
    NEED_DEVICE(device);
    __atomic_add_fetch(&primary[device].references, 1, __ATOMIC_SEQ_CST);
    *context = &primary[device];
    return 0;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER("cuDevicePrimaryCtxRelease", "\"device\": %d", device);
    NEED_DEVICE(device);
    if (__atomic_sub_fetch(&primary[device].references, 1, __ATOMIC_SEQ_CST) >= 0) return 0;
    primary[device].references = 0;
    return INVALID_CONTEXT;
}

static int valid(Context *context) {
    return context >= primary && context < primary + MAX_DEVICES && context->references > 0;
}

API cuCtxPushCurrent_v2(Context *context) {
    ENTER("cuCtxPushCurrent", "\"context\": %zu", (size_t)context);
    if (!valid(context)) return INVALID_CONTEXT;
    if (depth == 64) return OUT_OF_MEMORY;
    stack[depth++] = context;
    return 0;
}

API cuCtxPopCurrent_v2(Context **context) {
    ENTER("cuCtxPopCurrent", "");
    NEED_CONTEXT();
    depth--;
    if (context) *context = stack[depth];
    return 0;
}

API cuCtxSetCurrent(Context *context) {
    ENTER("cuCtxSetCurrent", "\"context\": %zu", (size_t)context);
    if (context && !valid(context)) return INVALID_CONTEXT;
    if (!context) depth -= depth > 0;
    else stack[depth ? depth - 1 : depth++] = context;
    return 0;
}

API cuCtxGetCurrent(Context **context) {
    ENTER("cuCtxGetCurrent", "");
    *context = depth ? stack[depth - 1] : NULL;
    return 0;
}

API cuCtxSynchronize(void) {
    ENTER("cuCtxSynchronize", "");
    NEED_CONTEXT();
    NOT_IN_CAPTURE();
    return 0;
}

/* --- libraries, kernels, launches ------------------------------------------------------------------------------- */

API cuLibraryLoadData(Library **library, const char *image, void *o, void *v, u32 n, void *lo, void *lv, u32 ln) {
    (void)o, (void)v, (void)n, (void)lo, (void)lv, (void)ln;
    size_t head = strnlen(image, 4096);
    const char *kind = !strncmp(image, "\x7f" "ELF", 4) ? "elf" : memmem(image, head, ".version", 8) ? "ptx" : "";
    ENTER("cuLibraryLoadData", "\"kind\": \"%s\", \"image\": %zu, \"text_bytes\": %zu", kind, (size_t)image,
          *kind == 'p' ? strlen(image) : 0);
    if (!*kind) return INVALID_IMAGE;
    *library = calloc(1, sizeof **library);
    (*library)->alive = 1;
    return 0;
}

API cuLibraryUnload(Library *library) {
    ENTER("cuLibraryUnload", "\"library\": %zu", (size_t)library);
    if (!library || !library->alive) return INVALID_HANDLE;
    library->alive = 0;
    return 0;
}

API cuLibraryGetKernel(Kernel **kernel, Library *library, const char *entry) {
    ENTER("cuLibraryGetKernel", "\"library\": %zu, \"entry\": \"%s\"", (size_t)library, entry);
    if (!library || !library->alive) return INVALID_HANDLE;
    if (find(entry) && find(entry)->missing) return NOT_FOUND;
    *kernel = calloc(1, sizeof **kernel);
    (*kernel)->library = library;
    snprintf((*kernel)->entry, sizeof (*kernel)->entry, "%s", entry);
    return 0;
}

API cuKernelGetFunction(Function **function, Kernel *kernel) {
    ENTER("cuKernelGetFunction", "\"entry\": \"%s\"", kernel ? kernel->entry : "");
    NEED_CONTEXT();
    if (!kernel || !kernel->library->alive) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    Function *item = functions;
    while (item && (item->kernel != kernel || item->context != stack[depth - 1])) item = item->next;
    if (!item) {
        item = calloc(1, sizeof *item);
        item->kernel = kernel;
        item->context = stack[depth - 1];
        item->attributes[0] = 1024;
        item->attributes[4] = 32;
        item->attributes[6] = 90;
        item->next = functions;
        functions = item;
    }
    pthread_mutex_unlock(&lock);
    *function = item;
    return 0;
}

API cuFuncSetAttribute(Function *function, int attribute, int value) {
    ENTER("cuFuncSetAttribute", "\"entry\": \"%s\", \"attribute\": %d, \"value\": %d", function->kernel->entry,
          attribute, value);
    if (attribute < 0 || attribute >= FUNCTION_ATTRIBUTES || value < 0) return INVALID_VALUE;
    if (attribute == MAX_DYNAMIC_SMEM && value > attributes[function->context->device][SMEM_OPTIN]) return INVALID_VALUE;
    function->attributes[attribute] = value;
    return 0;
}

API cuFuncGetAttribute(int *value, int attribute, Function *function) {
    ENTER("cuFuncGetAttribute", "\"entry\": \"%s\", \"attribute\": %d", function->kernel->entry, attribute);
    if (attribute < 0 || attribute >= FUNCTION_ATTRIBUTES) return INVALID_VALUE;
    *value = function->attributes[attribute];
    return 0;
}

static void launch_attributes(const Config *config, u32 cluster[3], u32 *pdl, u32 *cooperative) {
    cluster[0] = cluster[1] = cluster[2] = 1;
    *pdl = *cooperative = 0;
    for (u32 i = 0; i < config->count; i++) {
        if (config->attributes[i].id == 2) *cooperative = config->attributes[i].value.words[0];
        if (config->attributes[i].id == 4) memcpy(cluster, config->attributes[i].value.words, 12);
        if (config->attributes[i].id == 6) *pdl = config->attributes[i].value.words[0];
    }
}

API cuOccupancyMaxActiveClusters(int *count, Function *function, const Config *config) {
    u32 c[3], pdl, cooperative;
    launch_attributes(config, c, &pdl, &cooperative);
    ENTER("cuOccupancyMaxActiveClusters", "\"entry\": \"%s\", \"cluster\": [%u, %u, %u], \"smem\": %u",
          function->kernel->entry, c[0], c[1], c[2], config->smem);
    if (c[0] * c[1] * c[2] > 8 && !function->attributes[NON_PORTABLE_CLUSTER]) return INVALID_CLUSTER_SIZE;
    *count = attributes[function->context->device][SM_COUNT] / (c[0] * c[1] * c[2]);
    return 0;
}

static void add(Stream *stream, Node node) {
    Node *item = malloc(sizeof *item);
    *item = node;
    item->next = NULL;
    *stream->capture->last = item;
    stream->capture->last = &item->next;
}

static int special(const void *stream) { return (size_t)stream <= 2; } /* NULL, CU_STREAM_LEGACY, _PER_THREAD */

static CUresult check(Function *function, const Config *config, const u32 cluster[3]) {
    const u32 *grid = config->grid, *block = config->block;
    u32 size = cluster[0] * cluster[1] * cluster[2];
    if (special(config->stream)) {
        NEED_CONTEXT();
        if (function->context != stack[depth - 1]) return INVALID_HANDLE;
    }
    if (!function->kernel->library->alive) return INVALID_HANDLE;
    for (int i = 0; i < 3; i++) {
        if (!grid[i] || !block[i] || grid[i] > (i ? 65535u : 0x7fffffffu)) return INVALID_VALUE;
        if (!cluster[i] || grid[i] % cluster[i]) return INVALID_CLUSTER_SIZE;
    }
    if ((uint64_t)block[0] * block[1] * block[2] > 1024) return INVALID_VALUE;
    if (size > 8 && !function->attributes[NON_PORTABLE_CLUSTER]) return INVALID_CLUSTER_SIZE;
    if (size > 1 && !attributes[function->context->device][CLUSTER_LAUNCH]) return NOT_SUPPORTED;
    if (config->smem > 48 << 10 && (int)config->smem > function->attributes[MAX_DYNAMIC_SMEM]) return INVALID_VALUE;
    return 0;
}

static CUresult launch(const char *name, const Config *config, Function *function, void **params) {
    char line[8192];
    size_t n = 0;
    u32 cluster[3], pdl, cooperative;
    const u32 *grid = config->grid, *block = config->block;
    Sizes *known = find(function->kernel->entry);
    launch_attributes(config, cluster, &pdl, &cooperative);
    n += snprintf(line, sizeof line,
                  "\"entry\": \"%s\", \"device\": %d, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], "
                  "\"cluster\": [%u, %u, %u], \"smem\": %u, \"pdl\": %s, \"cooperative\": %s, \"stream\": %zu, \"params\": [",
                  function->kernel->entry, function->context->device, grid[0], grid[1], grid[2], block[0], block[1],
                  block[2], cluster[0], cluster[1], cluster[2], config->smem, pdl ? "true" : "false",
                  cooperative ? "true" : "false", (size_t)config->stream);
    for (int i = 0; known && i < known->count; i++) {
        n += snprintf(line + n, sizeof line - n, i ? ", \"" : "\"");
        for (int j = 0; j < known->sizes[i]; j++)
            n += snprintf(line + n, sizeof line - n, "%02x", ((unsigned char *)params[i])[j]);
        n += snprintf(line + n, sizeof line - n, "\"");
    }
    Stream *stream = special(config->stream) ? NULL : config->stream;
    snprintf(line + n, sizeof line - n, "], \"captured\": %s", stream && stream->capture ? "true" : "false");
    ENTER(name, "%s", line);
    CUresult code = check(function, config, cluster);
    if (code) return code;
    char *json;
    if (asprintf(&json, "{\"call\": \"%s\", %s}", name, line) < 0) return OUT_OF_MEMORY;
    if (stream && stream->capture) {
        add(stream, (Node){.launch = json});
        return 0;
    }
    if (on_launch) on_launch(json);
    free(json);
    return 0;
}

API cuLaunchKernelEx(const Config *config, Function *function, void **params, void **extra) {
    (void)extra;
    return launch("cuLaunchKernelEx", config, function, params);
}

API cuLaunchKernel(Function *function, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 smem, void *stream,
                   void **params, void **extra) {
    (void)extra;
    Config config = {{gx, gy, gz}, {bx, by, bz}, smem, stream, NULL, 0};
    return launch("cuLaunchKernel", &config, function, params);
}

/* --- tensor maps ------------------------------------------------------------------------------------------------ */

static void list(char *out, size_t room, int count, const uint64_t *longs, const u32 *ints) {
    size_t n = snprintf(out, room, "[");
    for (int i = 0; i < count; i++)
        n += snprintf(out + n, room - n, "%s%llu", i ? ", " : "", (unsigned long long)(longs ? longs[i] : ints[i]));
    snprintf(out + n, room - n, "]");
}

/* Fills `map` with "FAKETMAP", the address, rank, type, interleave, swizzle, promotion, fill (bytes), padding to 24,
 * five dims (u64), four strides (u64), five box sizes (u16), five element strides (u16), padding. */
API cuTensorMapEncodeTiled(void *map, int type, u32 rank, void *address, const uint64_t *dims, const uint64_t *strides,
                           const u32 *box, const u32 *steps, int interleave, int swizzle, int promotion, int fill) {
    static const int sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}, spans[] = {0, 32, 64, 128, 128, 128, 128};
    char text[4][256];
    int n = rank <= 5 ? (int)rank : 0;
    list(text[0], 256, n, dims, NULL);
    list(text[1], 256, n ? n - 1 : 0, strides, NULL);
    list(text[2], 256, n, NULL, box);
    list(text[3], 256, n, NULL, steps);
    ENTER("cuTensorMapEncodeTiled",
          "\"data_type\": %d, \"rank\": %u, \"address\": %zu, \"dims\": %s, \"strides\": %s, \"box\": %s, "
          "\"element_strides\": %s, \"interleave\": %d, \"swizzle\": %d, \"l2_promotion\": %d, \"oob_fill\": %d",
          type, rank, (size_t)address, text[0], text[1], text[2], text[3], interleave, swizzle, promotion, fill);
    if ((size_t)map % 64 || !n || type < 0 || type > 12 || interleave < 0 || interleave > 2 || swizzle < 0 ||
        swizzle > 6 || promotion < 0 || promotion > 3 || fill < 0 || fill > 1)
        return INVALID_VALUE;
    if (interleave && n < 3) return INVALID_VALUE;
    int unit = interleave == 2 ? 32 : 16;
    if ((size_t)address % unit) return INVALID_VALUE;
    for (int i = 0; i < n; i++) {
        if (dims[i] < 1 || dims[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || steps[i] < 1 || steps[i] > 8)
            return INVALID_VALUE;
        if (i + 1 < n && (strides[i] % unit || strides[i] >= 1ull << 40)) return INVALID_VALUE;
    }
    u32 inner = box[0] * sizes[type];
    if (!interleave && (inner % 16 || (swizzle && inner > (u32)spans[swizzle]))) return INVALID_VALUE;
    unsigned char *out = memset(map, 0, 128);
    unsigned char small[8] = {n, type, interleave, swizzle, promotion, fill};
    uint64_t place = (uint64_t)(size_t)address;
    memcpy(out, "FAKETMAP", 8);
    memcpy(out + 8, &place, 8);
    memcpy(out + 16, small, 8);
    memcpy(out + 24, dims, 8 * n);
    memcpy(out + 64, strides, 8 * (n - 1));
    for (int i = 0; i < n; i++) {
        uint16_t pair[2] = {box[i], steps[i]};
        memcpy(out + 96 + 2 * i, &pair[0], 2);
        memcpy(out + 106 + 2 * i, &pair[1], 2);
    }
    return 0;
}

/* --- memory ----------------------------------------------------------------------------------------------------- */

static Block *owner(CUdeviceptr address, size_t count) {
    pthread_mutex_lock(&lock);
    Block *block = blocks;
    while (block && (address < (size_t)block->start || address + count > (size_t)block->start + block->size))
        block = block->next;
    pthread_mutex_unlock(&lock);
    return block;
}

API cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    ENTER("cuMemAlloc", "\"bytes\": %zu", size);
    NEED_CONTEXT();
    NOT_IN_CAPTURE();
    if (!size) return INVALID_VALUE;
    if (size > 1ull << 34) return OUT_OF_MEMORY;
    Block *block = malloc(sizeof *block);
    *block = (Block){NULL, aligned_alloc(256, (size + 255) / 256 * 256), size, stack[depth - 1]->device};
    memset(block->start, 0xcd, size);
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    *address = (size_t)block->start;
    return 0;
}

API cuMemFree_v2(CUdeviceptr address) {
    ENTER("cuMemFree", "\"address\": %zu", (size_t)address);
    NEED_CONTEXT();
    NOT_IN_CAPTURE();
    CUresult code = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (Block **at = &blocks; *at; at = &(*at)->next)
        if ((size_t)(*at)->start == address) {
            Block *block = *at;
            *at = block->next;
            free(block->start);
            free(block);
            code = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

API cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t count) {
    ENTER("cuMemcpyHtoD", "\"address\": %zu, \"bytes\": %zu, \"from\": %zu", (size_t)to, count, (size_t)from);
    NEED_CONTEXT();
    NOT_IN_CAPTURE();
    if (!owner(to, count)) return INVALID_VALUE;
    memcpy((void *)to, from, count);
    return 0;
}

API cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t count) {
    ENTER("cuMemcpyDtoH", "\"address\": %zu, \"bytes\": %zu", (size_t)from, count);
    NEED_CONTEXT();
    NOT_IN_CAPTURE();
    if (!owner(from, count)) return INVALID_VALUE;
    memcpy(to, (void *)from, count);
    return 0;
}

API cuMemsetD8_v2(CUdeviceptr address, unsigned char byte, size_t count) {
    ENTER("cuMemsetD8", "\"address\": %zu, \"byte\": %u, \"bytes\": %zu", (size_t)address, byte, count);
    NEED_CONTEXT();
    NOT_IN_CAPTURE();
    if (!owner(address, count)) return INVALID_VALUE;
    memset((void *)address, byte, count);
    return 0;
}

API cuMemsetD8Async(CUdeviceptr address, unsigned char byte, size_t count, void *handle) {
    Stream *stream = special(handle) ? NULL : handle;
    ENTER("cuMemsetD8Async", "\"address\": %zu, \"byte\": %u, \"bytes\": %zu, \"stream\": %zu, \"captured\": %s",
          (size_t)address, byte, count, (size_t)handle, stream && stream->capture ? "true" : "false");
    if (!stream) NEED_CONTEXT();
    if (!owner(address, count)) return INVALID_VALUE;
    if (stream && stream->capture) add(stream, (Node){.address = address, .byte = byte, .count = count});
    else memset((void *)address, byte, count);
    return 0;
}

API cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    ENTER("cuPointerGetAttribute", "\"attribute\": %d, \"address\": %zu", attribute, (size_t)address);
    Block *block = owner(address, 1);
    if (!block) return INVALID_VALUE;
    if (attribute == 2) *(u32 *)value = 2; /* CU_MEMORYTYPE_DEVICE */
    else if (attribute == 9) *(int *)value = block->device;
    else return NOT_SUPPORTED;
    return 0;
}

/* --- streams, events, graphs ------------------------------------------------------------------------------------ */

API cuStreamCreate(Stream **stream, u32 flags) {
    ENTER("cuStreamCreate", "\"flags\": %u", flags);
    NEED_CONTEXT();
    *stream = calloc(1, sizeof **stream);
    return 0;
}

API cuStreamDestroy_v2(Stream *stream) { ENTER("cuStreamDestroy", "\"stream\": %zu", (size_t)stream); return 0; }

API cuStreamSynchronize(Stream *stream) {
    ENTER("cuStreamSynchronize", "\"stream\": %zu", (size_t)stream);
    if (special(stream)) NEED_CONTEXT();
    NOT_IN_CAPTURE();
    return 0;
}

API cuEventCreate(Event **event, u32 flags) {
    ENTER("cuEventCreate", "\"flags\": %u", flags);
    NEED_CONTEXT();
    *event = calloc(1, sizeof **event);
    return 0;
}

API cuEventDestroy_v2(Event *event) { ENTER("cuEventDestroy", "\"event\": %zu", (size_t)event); return 0; }

API cuEventRecord(Event *event, void *stream) {
    struct timespec now;
    ENTER("cuEventRecord", "\"event\": %zu, \"stream\": %zu", (size_t)event, (size_t)stream);
    clock_gettime(CLOCK_MONOTONIC, &now);
    *event = (Event){now.tv_sec * 1e3 + now.tv_nsec * 1e-6, 1};
    return 0;
}

API cuEventSynchronize(Event *event) { ENTER("cuEventSynchronize", "\"event\": %zu", (size_t)event); return 0; }

API cuEventElapsedTime(float *ms, Event *start, Event *end) {
    ENTER("cuEventElapsedTime", "");
    if (!start->recorded || !end->recorded) return INVALID_HANDLE;
    *ms = (float)(end->ms - start->ms);
    return 0;
}

API cuStreamBeginCapture_v2(Stream *stream, int mode) {
    ENTER("cuStreamBeginCapture", "\"stream\": %zu, \"mode\": %d", (size_t)stream, mode);
    if (special(stream)) return CAPTURE_UNSUPPORTED;
    if (stream->capture) return INVALID_VALUE;
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->capture->last = &stream->capture->first;
    capturing++;
    return 0;
}

API cuStreamEndCapture(Stream *stream, Graph **graph) {
    ENTER("cuStreamEndCapture", "\"stream\": %zu", (size_t)stream);
    if (special(stream) || !stream->capture) return INVALID_VALUE;
    *graph = stream->capture;
    stream->capture = NULL;
    capturing--;
    return 0;
}

API cuGraphInstantiateWithFlags(Graph **executable, Graph *graph, uint64_t flags) {
    ENTER("cuGraphInstantiate", "\"graph\": %zu, \"flags\": %zu", (size_t)graph, (size_t)flags);
    *executable = graph;
    return 0;
}

API cuGraphLaunch(Graph *executable, void *stream) {
    ENTER("cuGraphLaunch", "\"graph\": %zu, \"stream\": %zu", (size_t)executable, (size_t)stream);
    for (Node *node = executable->first; node; node = node->next)
        if (!node->launch) memset((void *)node->address, node->byte, node->count);
        else if (on_launch) on_launch(node->launch);
    return 0;
}

API cuGraphDestroy(Graph *graph) { ENTER("cuGraphDestroy", "\"graph\": %zu", (size_t)graph); return 0; }

API cuGraphExecDestroy(Graph *graph) { ENTER("cuGraphExecDestroy", "\"graph\": %zu", (size_t)graph); return 0; }
