// Runs the threads of a launch as fibers of one CPU thread, and checks what they do to memory.
//
// A fiber runs until it waits (at a barrier, in a warp's collective) or could see what others do (an atomic, a volatile
// or acquiring load). Who runs next is drawn from the launch's seed, as are the order of blocks and what shared memory
// holds at first. The blocks of a cluster run together, those of a cooperative launch all do, others one by one.
#pragma once
#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#include "arithmetic.h"

struct Range {
    u64 start, end;
};

// A launch as the driver describes it; __init__.py has the same structure.
struct Launch {
    u32 grid[3], block[3], cluster[3], smem, cooperative;
    u64 seed;
    void **params;
    const Range *memory;  // what kernels may access
    u64 ranges;
    char *message;  // the error, empty where there is none
    u64 message_size;
};

struct Thread;

// An entry: its function, bytes of static shared memory, offset of the dynamic part, its module's variables.
struct Kernel {
    const char *name;
    void (*body)(Thread &);
    u32 dynamic;
    const Range *variables;
    u64 variables_count;
};

enum Space { generic, global, shared, shared_cluster, local, param };
enum Shuffle { up, down, bfly, idx };

constexpr u32 FIRST_SHARED = 1024;  // offset of the first byte that a kernel may use, as on Hopper
constexpr u32 RANK_SHIFT = 24;      // shared::cluster addresses: rank + 1 over the offset; 0: the own block's
constexpr u64 STACK = 1 << 20;      // bytes a fiber
constexpr u32 MAX_IDLE = 20000;     // rounds in which all fibers that run only spin
constexpr u32 HELD_ROUNDS = 64;
constexpr u64 MAX_LOOPS = 1ull << 30;

// Threads that wait for each other, time after time; values of two times are kept, as who is released first may come
// back before the last has read.
struct Meeting {
    u32 key = 0, arrived = 0, generation = 0;
    const char *at = nullptr;
    u64 values[2][32];
    u32 sum[2] = {}, total[2] = {};
    void release() {
        total[generation & 1] = arrived;
        arrived = 0;
        sum[++generation & 1] = 0;
    }
};

struct Warp {
    u32 live = 0;
    std::vector<Meeting *> meetings;
    Meeting &meeting(u32 mask) {
        for (Meeting *known : meetings)
            if (known->key == mask) return *known;
        meetings.push_back(new Meeting{mask});
        return *meetings.back();
    }
    ~Warp() {
        for (Meeting *meeting : meetings) delete meeting;
    }
};

struct Machine;

struct Block {
    u32 ctaid[3], rank, live;
    std::vector<u64> storage;
    char *memory;  // of offset 0
    std::vector<Warp> warps;
    Meeting barriers[16];
};

struct Thread {
    Machine &machine;
    const Launch &launch;
    Block &block;
    Warp &warp;
    u32 tid[3], index, lane;
    char *stack;
    jmp_buf state;
    bool started = false, done = false, carry = false;
    const u32 *waits_on = nullptr;  // while it is `waits_at`
    u32 waits_at = 0, cluster_generation = 0;
    const char *doing = "";
    Range locals = {};
    u64 loops = 0;

    [[noreturn]] void fault(const char *format, ...);
    void leave();
    void wait(const Meeting &meeting, u32 generation, const char *what);
    void spin();
    void loop();
    void exit();
    char *at(Space space, u64 address, u32 bytes, const char *what);
    template <class T> auto *at(Space space, u64 address, const char *what, u32 count = 1) {
        using Bits = ::Bits<T>;
        typedef std::conditional_t<real<T>, Bits, T> Item __attribute__((may_alias));
        return (Item *)at(space, address, sizeof(Bits) * count, what);
    }
    u64 to_generic(Space space, u64 address);
    u64 from_generic(Space space, u64 address);
    bool is_space(Space space, u64 address);
    u64 map_rank(bool generic_address, u64 address, u32 rank);
    u32 rank_of(bool generic_address, u64 address);
    u64 noise();

    void barrier(u32 id, u32 count, bool waits, bool value, const char *what);
    u32 said = 0, out_of = 0;  // of the last barrier or vote: threads with a true value, and threads that took part
    void cluster_arrive();
    void cluster_wait();
    Meeting &meet(u32 mask, u64 value, const char *what, u32 &slot);
    u32 shfl(Shuffle mode, u32 value, u32 b, u32 c, u32 mask, bool &inside);
    u32 ballot(bool value, u32 mask);
    bool vote_all(bool value, u32 mask) { return ballot(value, mask), said == out_of; }
    bool vote_any(bool value, u32 mask) { return ballot(value, mask), said; }
    bool vote_uni(bool value, u32 mask) { return ballot(value, mask), !said || said == out_of; }
    void sync(u32 mask) {
        u32 slot;
        meet(mask, 0, "bar.warp.sync", slot);
    }
    u32 elect(u32 mask, bool &leader);
    u32 match_any(u64 value, u32 mask);
    u32 match_all(u64 value, u32 mask, bool &all);
    template <class F> u32 redux(F f, u32 value, u32 mask) {
        u32 slot, result = 0;
        bool first = true;
        Meeting &meeting = meet(mask, value, "redux.sync", slot);
        for (u32 i = 0; i < 32; i++)
            if (meeting.total[slot] >> i & 1) {
                result = first ? u32(meeting.values[slot][i]) : f(result, u32(meeting.values[slot][i]));
                first = false;
            }
        return result;
    }
    template <class T, class F> Bits<T> atomic(Space space, u64 address, F f) {
        spin();
        auto *word = (Bits<T> *)at(space, address, sizeof(Bits<T>), "updates");
        Bits<T> old = *word, value = f(old);
        changes(value != old);
        *word = value;
        return old;
    }
    void changes(bool moves);
    void copy_async(u64 to, u64 from, u32 bytes, u32 given) {
        char *target = at(shared, to, bytes, "writes");
        std::memset(target, 0, bytes);
        if (given) std::memcpy(target, at(global, from, given, "reads"), given);
    }
};

struct Machine {
    const Kernel &kernel;
    const Launch &launch;
    u64 random;
    std::vector<Block> blocks;
    std::vector<Thread> threads;
    Meeting cluster;
    u32 cluster_live = 0;
    u64 ticks = 0;
    jmp_buf scheduler;
    bool failed = false, progress = false;

    u64 draw() {  // xorshift*
        random ^= random >> 12, random ^= random << 25, random ^= random >> 27;
        return random * 0x2545f4914f6cdd1d;
    }
    template <class T> void shuffle(std::vector<T> &items) {
        for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[draw() % i]);
    }
    u32 shared_end() const { return kernel.dynamic + launch.smem; }

    void fault(const Thread &thread, const char *format, ...) {
        va_list arguments;
        va_start(arguments, format);
        fault(thread, format, arguments);
        va_end(arguments);
    }
    void fault(const Thread &thread, const char *format, va_list arguments) {
        failed = true;
        const u32 *b = thread.block.ctaid, *t = thread.tid;
        int used = std::snprintf(launch.message, launch.message_size, "%s: block (%u, %u, %u), thread (%u, %u, %u) ",
                                 kernel.name, b[0], b[1], b[2], t[0], t[1], t[2]);
        std::vsnprintf(launch.message + used, launch.message_size - used, format, arguments);
    }

    void resume(Thread &thread);
    void run(const std::vector<u32> &ids, char *stacks);
    void start(const std::vector<u32> &ids, char *stacks);
};

inline thread_local Thread *starting;
inline thread_local ucontext_t starter;

inline void Thread::fault(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    machine.fault(*this, format, arguments);
    va_end(arguments);
    _longjmp(machine.scheduler, 1);
}

[[gnu::noinline]] inline void Thread::leave() {
    if (!_setjmp(state)) _longjmp(machine.scheduler, 1);
}

inline void Thread::wait(const Meeting &meeting, u32 generation, const char *what) {
    if (meeting.generation != generation) return;
    waits_on = &meeting.generation, waits_at = generation, doing = what;
    machine.progress = true;
    leave();
}

inline void Thread::spin() {
    doing = "an atomic, a volatile or acquiring load, or nanosleep";
    leave();
}

// At each jump backward: lets others run now and then, and ends what never ends.
inline void Thread::loop() {
    if (++loops % 65536) return;
    if (loops >= MAX_LOOPS) fault("has jumped backward %llu times", (unsigned long long)loops);
    machine.progress = true;
    leave();
}

inline void Thread::exit() {
    done = machine.progress = true;
    warp.live &= ~(1u << lane);
    block.live--, machine.cluster_live--;
    for (Meeting *meeting : warp.meetings)
        if (meeting->arrived && meeting->arrived == (meeting->key & warp.live)) meeting->release();
    for (Meeting &barrier : block.barriers)
        if (barrier.arrived && !barrier.key && barrier.arrived == block.live) barrier.release();
    if (machine.cluster.arrived && machine.cluster.arrived == machine.cluster_live) machine.cluster.release();
    leave();
}

inline u64 Thread::noise() { return machine.draw(); }

inline void Thread::changes(bool moves) { machine.progress |= moves; }

inline char *Thread::at(Space space, u64 address, u32 bytes, const char *what) {
    if (address % bytes) fault("%s %u bytes at %#llx, which is misaligned", what, bytes, (unsigned long long)address);
    if (space == param) return (char *)address;
    if (space == shared || space == shared_cluster) {
        u32 rank = address >> RANK_SHIFT, offset = address & ((1u << RANK_SHIFT) - 1);
        Block *owner = &block;
        if (rank && space == shared_cluster) {
            u32 size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
            if (address >> 32 || rank > size) fault("%s shared memory of block %u of a cluster of %u", what, rank - 1, size);
            owner = &block - block.rank + (rank - 1);
            if (!owner->live) fault("%s shared memory of block %u of its cluster, which has exited", what, rank - 1);
        } else if (rank) {
            offset = ~0u;
        }
        if (offset < FIRST_SHARED || u64(offset) + bytes > machine.shared_end())
            fault("%s %u bytes at byte %lld of the block's %u bytes of shared memory", what, bytes,
                  (long long)address - FIRST_SHARED, machine.shared_end() - FIRST_SHARED);
        return owner->memory + offset;
    }
    auto inside = [&](const Range &range) { return address >= range.start && address + bytes <= range.end; };
    if (space != global) {
        if (inside(locals)) return (char *)address;
        if (space == local) fault("%s %u bytes outside of its local memory", what, bytes);
        u32 size = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
        for (u32 i = 0; i < size; i++) {
            Block &owner = (&block - block.rank)[i];
            if (inside({u64(owner.memory + FIRST_SHARED), u64(owner.memory + machine.shared_end())})) {
                if (!owner.live) fault("%s shared memory of block %u of its cluster, which has exited", what, i);
                return (char *)address;
            }
        }
    }
    for (u64 i = 0; i < machine.kernel.variables_count; i++)
        if (inside(machine.kernel.variables[i])) return (char *)address;
    const Range *nearest = nullptr;
    u64 best = ~0ull;
    for (const Range *range = launch.memory; range < launch.memory + launch.ranges; range++) {
        if (inside(*range)) return (char *)address;
        u64 distance = address < range->start ? range->start - address : address + bytes - range->end;
        if (distance < best) best = distance, nearest = range;
    }
    if (!nearest || best > 1 << 20) fault("%s %u bytes at %#llx, where nothing is", what, bytes, (unsigned long long)address);
    fault("%s %u bytes at byte %lld of a buffer of %llu", what, bytes, (long long)(address - nearest->start),
          (unsigned long long)(nearest->end - nearest->start));
}

inline u64 Thread::to_generic(Space space, u64 address) {
    if (space == shared_cluster && address >> RANK_SHIFT)
        return u64((&block - block.rank + ((address >> RANK_SHIFT) - 1))->memory) + (address & ((1u << RANK_SHIFT) - 1));
    return space == shared || space == shared_cluster ? u64(block.memory) + address : address;
}

inline u64 Thread::from_generic(Space space, u64 address) {
    if (space == shared) return address - u64(block.memory);
    if (space == shared_cluster) return (u64(rank_of(true, address) + 1) << RANK_SHIFT) + (address - u64((&block - block.rank + rank_of(true, address))->memory));
    return address;
}

inline u32 Thread::rank_of(bool generic_address, u64 address) {
    if (!generic_address) return address >> RANK_SHIFT ? (address >> RANK_SHIFT) - 1 : block.rank;
    for (u32 i = 0; i < launch.cluster[0] * launch.cluster[1] * launch.cluster[2]; i++) {
        u64 start = u64((&block - block.rank + i)->memory);
        if (address >= start && address <= start + machine.shared_end()) return i;
    }
    return block.rank;
}

inline u64 Thread::map_rank(bool generic_address, u64 address, u32 rank) {
    if (generic_address) return address - u64(block.memory) + u64((&block - block.rank + rank)->memory);
    return (u64(rank + 1) << RANK_SHIFT) | (address & ((1u << RANK_SHIFT) - 1));
}

inline bool Thread::is_space(Space space, u64 address) {
    auto shared_by = [&](Block &owner) {
        return address >= u64(owner.memory) && address < u64(owner.memory) + machine.shared_end();
    };
    bool own = shared_by(block), any = shared_by((&block - block.rank)[rank_of(true, address)]);
    bool mine = address >= locals.start && address < locals.end;
    return space == shared ? own : space == shared_cluster ? any : space == local ? mine : !any && !mine;
}

inline void Thread::barrier(u32 id, u32 count, bool waits, bool value, const char *what) {
    if (id > 15) fault("waits at barrier %u; there are 16", id);
    if (count % 32) fault("waits at barrier %u with %u threads, which are no whole warps", id, count);
    Meeting &barrier = block.barriers[id];
    if (barrier.arrived && barrier.key != count)
        fault("waits at barrier %u for %u threads, and others do for %u (0: all)", id, count, barrier.key);
    u32 slot = barrier.generation & 1, generation = barrier.generation;
    barrier.key = count, barrier.sum[slot] += value;
    if (++barrier.arrived == (count ? count : block.live)) barrier.release();
    else if (waits) wait(barrier, generation, what);
    said = barrier.sum[slot], out_of = barrier.total[slot];
}

inline void Thread::cluster_arrive() {
    cluster_generation = machine.cluster.generation;
    if (++machine.cluster.arrived == machine.cluster_live) machine.cluster.release();
}

inline void Thread::cluster_wait() { wait(machine.cluster, cluster_generation, "barrier.cluster.wait"); }

inline Meeting &Thread::meet(u32 mask, u64 value, const char *what, u32 &slot) {
    if (!(mask >> lane & 1)) fault("is not in the mask %#x of its own %s", mask, what);
    Meeting &meeting = warp.meeting(mask);
    if (meeting.arrived && std::strcmp(meeting.at, what)) fault("is at %s, and lanes of its mask %#x at %s", what, mask, meeting.at);
    u32 generation = meeting.generation;
    slot = generation & 1;
    meeting.at = what;
    meeting.values[slot][lane] = value;
    meeting.arrived |= 1u << lane;
    if (meeting.arrived == (mask & warp.live)) meeting.release();
    else wait(meeting, generation, what);
    return meeting;
}

inline u32 Thread::shfl(Shuffle mode, u32 value, u32 b, u32 c, u32 mask, bool &inside) {
    static const char *names[] = {"shfl.sync.up", "shfl.sync.down", "shfl.sync.bfly", "shfl.sync.idx"};
    u32 slot;
    Meeting &meeting = meet(mask, value, names[mode], slot);
    u32 segment = c >> 8 & 31, clamp = c & 31;
    b &= 31;
    s32 most = (lane & segment) | (clamp & ~segment), from;
    if (mode == up) from = s32(lane) - s32(b);
    else if (mode == down) from = lane + b;
    else if (mode == bfly) from = lane ^ b;
    else from = (lane & segment) | (b & ~segment);
    inside = mode == up ? from >= most : from <= most;
    if (!inside) from = lane;
    return meeting.total[slot] >> from & 1 ? u32(meeting.values[slot][from]) : u32(noise());
}

inline u32 Thread::ballot(bool value, u32 mask) {
    u32 slot, result = 0;
    Meeting &meeting = meet(mask, value, "vote.sync", slot);
    for (u32 i = 0; i < 32; i++)
        if (meeting.total[slot] >> i & 1 && meeting.values[slot][i]) result |= 1u << i;
    said = std::popcount(result), out_of = std::popcount(meeting.total[slot]);
    return result;
}

inline u32 Thread::match_any(u64 value, u32 mask) {
    u32 slot, result = 0;
    Meeting &meeting = meet(mask, value, "match.any.sync", slot);
    for (u32 i = 0; i < 32; i++)
        if (meeting.total[slot] >> i & 1 && meeting.values[slot][i] == value) result |= 1u << i;
    return result;
}

inline u32 Thread::match_all(u64 value, u32 mask, bool &all) {
    u32 slot;
    Meeting &meeting = meet(mask, value, "match.all.sync", slot);
    all = true;
    for (u32 i = 0; i < 32; i++) all &= !(meeting.total[slot] >> i & 1) || meeting.values[slot][i] == value;
    return all ? meeting.total[slot] : 0;
}

inline u32 Thread::elect(u32 mask, bool &leader) {
    u32 slot;
    Meeting &meeting = meet(mask, 0, "elect.sync", slot);
    u32 first = std::countr_zero(meeting.total[slot]);
    leader = first == lane;
    return first;
}

// Returns when the thread leaves.
[[gnu::noinline]] inline void Machine::resume(Thread &thread) {
    if (_setjmp(scheduler)) return;
    if (thread.started) _longjmp(thread.state, 1);
    thread.started = true;
    starting = &thread;
    getcontext(&starter);
    starter.uc_stack.ss_sp = thread.stack, starter.uc_stack.ss_size = STACK, starter.uc_link = nullptr;
    makecontext(&starter, [] {
        Thread &thread = *starting;
        thread.machine.kernel.body(thread);
        thread.exit();
    }, 0);
    setcontext(&starter);
}

// Blocks that are on the device together, by their places in the grid.
inline void Machine::start(const std::vector<u32> &ids, char *stacks) {
    const u32 *grid = launch.grid, *size = launch.block, *cluster = launch.cluster;
    u32 count = size[0] * size[1] * size[2], in_cluster = cluster[0] * cluster[1] * cluster[2];
    threads.clear(), blocks.clear();
    threads.reserve(ids.size() * count), blocks.resize(ids.size());
    for (u32 i = 0; i < ids.size(); i++) {
        Block &block = blocks[i];
        // The blocks of a cluster are neighbours in the grid; `ids` counts them cluster by cluster.
        u32 rank = ids[i] % in_cluster, of = ids[i] / in_cluster;
        u32 across[2] = {grid[0] / cluster[0], grid[1] / cluster[1]};
        block.ctaid[0] = of % across[0] * cluster[0] + rank % cluster[0];
        block.ctaid[1] = of / across[0] % across[1] * cluster[1] + rank / cluster[0] % cluster[1];
        block.ctaid[2] = of / across[0] / across[1] * cluster[2] + rank / cluster[0] / cluster[1];
        block.rank = rank, block.live = count;
        block.storage.resize((shared_end() + 1024) / 8 + 1);
        for (u64 &word : block.storage) word = draw();
        block.memory = (char *)((u64(block.storage.data()) + 1023) / 1024 * 1024);
        block.warps.resize((count + 31) / 32);
        for (u32 t = 0; t < count; t++) {
            Warp &warp = block.warps[t / 32];
            warp.live |= 1u << t % 32;
            threads.push_back({*this, launch, block, warp, {t % size[0], t / size[0] % size[1], t / size[0] / size[1]}, t, t % 32,
                               stacks + STACK * threads.size()});
        }
    }
    cluster_live = threads.size();
    this->cluster = {};
}

inline void Machine::run(const std::vector<u32> &ids, char *stacks) {
    start(ids, stacks);
    std::vector<u32> order(threads.size());
    for (u32 i = 0; i < order.size(); i++) order[i] = i;
    // Some warps are held back for some rounds: else all would go from one collective to the next side by side, and a
    // warp would never see what another does two collectives later.
    u64 held = 0;
    for (u32 idle = 0, rounds = 0;; rounds--) {
        if (!rounds) held = draw(), rounds = 1 + draw() % HELD_ROUNDS;
        shuffle(order);
        bool ran = false;
        progress = false;
        Thread *left = nullptr;
        for (u32 i : order) {
            Thread &thread = threads[i];
            if (thread.done) continue;
            left = &thread;
            if (held >> (i / 32) % 64 & 1) continue;
            if (thread.waits_on) {
                if (*thread.waits_on == thread.waits_at) continue;
                thread.waits_on = nullptr;
            }
            ran = true;
            resume(thread);
            if (failed) return;
        }
        if (!left) return;
        if (!ran && held) {
            held = 0, rounds = 2;  // the next round holds no one back
            continue;
        }
        idle = progress ? 0 : idle + 1;
        if (!ran || idle > MAX_IDLE) {
            u32 others = 0;
            for (Thread &thread : threads) others += !thread.done;
            fault(*left, "%s at %s, and none of the %u threads left can go on", ran ? "spins" : "waits", left->doing, others);
            return;
        }
    }
}

inline void launch_kernel(const Kernel &kernel, const Launch &launch) {
    u32 blocks = launch.grid[0] * launch.grid[1] * launch.grid[2];
    u32 together = launch.cooperative ? blocks : launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
    u64 size = STACK * together * launch.block[0] * launch.block[1] * launch.block[2];
    char *stacks = (char *)mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) {
        std::snprintf(launch.message, launch.message_size, "%s: no memory for stacks", kernel.name);
        return;
    }
    Machine machine{kernel, launch, launch.seed * 2 + 1};
    for (int i = 0; i < 8; i++) machine.draw();
    std::vector<u32> groups(blocks / together), ids(together);
    for (u32 i = 0; i < groups.size(); i++) groups[i] = i;
    machine.shuffle(groups);
    for (u32 group : groups) {
        for (u32 i = 0; i < together; i++) ids[i] = group * together + i;
        machine.run(ids, stacks);
        if (machine.failed) break;
    }
    munmap(stacks, size);
}
