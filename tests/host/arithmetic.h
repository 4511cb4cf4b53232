// What the instructions of PTX compute. Registers hold bits; a function has the instruction's name with an underscore
// (some names are words of C++), its type as the first template argument, and takes and returns bits.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using b8 = u8;
using b16 = u16;
using b32 = u32;
using b64 = u64;
using f32 = float;
using f64 = double;
using pred = bool;

enum Rounding { rn, rz, rm, rp };

// A float format of E exponent and M mantissa bits; its values are worked with as doubles.
template <int E, int M> struct Small {};
using f16 = Small<5, 10>;
using bf16 = Small<8, 7>;
using e4m3 = Small<4, 3>;
using e5m2 = Small<5, 2>;

// The value of `x` in a format, as bits. Without infinities (e4m3) what is too large is NaN.
template <int E, int M, Rounding R = rn> u32 encode(double x, bool satfinite = false) {
    constexpr u32 negative = 1u << (E + M), infinity = E == 4 ? 0x7f : ((1u << E) - 1) << M, most = infinity - 1;
    constexpr int least = 2 - (1 << (E - 1));  // exponent of the smallest normal number
    u32 sign = std::signbit(x) ? negative : 0;
    if (std::isnan(x)) return negative - 1;
    if (std::isinf(x)) return sign | (satfinite ? most : infinity);
    int exponent = x == 0 ? least : std::max(std::ilogb(x), least);
    double scaled = std::scalbn(std::fabs(x), M - exponent);
    bool up = R == rp ? !sign : R == rm && sign;
    double rounded = R == rn ? std::nearbyint(scaled) : up ? std::ceil(scaled) : std::floor(scaled);
    u64 bits = (u64(exponent - least) << M) + u64(rounded);
    if (bits > most) bits = satfinite || (R != rn && !up) ? most : infinity;
    return sign | u32(bits);
}

template <int E, int M> double decode(u32 bits) {
    constexpr u32 ones = (1u << E) - 1;
    constexpr int least = 2 - (1 << (E - 1));
    u32 exponent = bits >> M & ones, mantissa = bits & ((1u << M) - 1);
    double size = std::scalbn(double(exponent ? mantissa | 1u << M : mantissa), int(std::max(exponent, 1u)) - 1 + least - M);
    if (E == 4 ? (bits & 0x7f) == 0x7f : exponent == ones) size = E != 4 && !mantissa ? INFINITY : NAN;
    return bits >> (E + M) & 1 ? -size : size;
}

template <class T> struct Type {
    using Bits = std::make_unsigned_t<T>;
    static constexpr bool real = false;
    static T get(Bits bits) { return T(bits); }
    static Bits put(T value) { return Bits(value); }
};
template <> struct Type<bool> {
    using Bits = bool;
    static constexpr bool real = false;
    static bool get(bool bits) { return bits; }
    static bool put(bool value) { return value; }
};
template <> struct Type<f32> {
    using Bits = u32;
    static constexpr bool real = true;
    static f32 get(u32 bits) { return std::bit_cast<f32>(bits); }
    static u32 put(f32 value) { return value != value ? 0x7fffffff : std::bit_cast<u32>(value); }
    template <Rounding R> static u32 round(double value) { return R == rn ? put(f32(value)) : encode<8, 23, R>(value); }
};
template <> struct Type<f64> {
    using Bits = u64;
    static constexpr bool real = true;
    static f64 get(u64 bits) { return std::bit_cast<f64>(bits); }
    static u64 put(f64 value) { return value != value ? 0x7fffffffffffffff : std::bit_cast<u64>(value); }
    template <Rounding R> static u64 round(double value) {
        static_assert(R == rn, "f64 is only rounded to nearest");
        return put(value);
    }
};
template <int E, int M> struct Type<Small<E, M>> {
    using Bits = std::conditional_t<E + M == 7, u8, u16>;
    static constexpr bool real = true;
    static double get(Bits bits) { return decode<E, M>(bits); }
    static Bits put(double value) { return encode<E, M>(value); }
    template <Rounding R> static Bits round(double value) { return encode<E, M, R>(value); }
};
template <class T> using Bits = typename Type<T>::Bits;
template <class T> constexpr bool real = Type<T>::real;
template <class T> constexpr bool small = real<T> && sizeof(Bits<T>) < 4;
template <class T> constexpr bool is_signed = std::is_signed_v<T>;
template <class T> constexpr u32 width = 8 * sizeof(Bits<T>);
template <class T> auto get(Bits<T> bits) { return Type<T>::get(bits); }
template <class T, class V> Bits<T> put(V value) { return Type<T>::put(value); }

// `x`, which misses a result by `error`, rounded to odd instead of to nearest: to round that again is harmless.
inline double odd(double x, double error) {
    u64 bits = std::bit_cast<u64>(x);
    if (error == 0 || !std::isfinite(x) || bits & 1) return x;
    return std::bit_cast<double>((error > 0) == (x > 0) ? bits + 1 : bits - 1);
}
inline double odd_sum(double a, double b) {
    double sum = a + b, of_b = sum - a;
    return odd(sum, (a - (sum - of_b)) + (b - of_b));
}

// f(the high halves) and f(the low halves).
template <class F, class... A> u32 x2(F f, A... a) {
    return u32(u16(f(u16(a >> 16)...))) << 16 | u16(f(u16(a)...));
}

template <class T> Bits<T> ftz(Bits<T> a) {
    constexpr Bits<T> negative = Bits<T>(1) << (width<T> - 1);
    constexpr double least = std::is_same_v<T, f32> ? 0x1p-126 : 0x1p-14;
    return std::fabs(get<T>(a)) < least ? a & negative : a;
}
template <class T> Bits<T> sat01(Bits<T> a) {  // NaN is 0
    auto x = get<T>(a);
    return x > 0 ? x < 1 ? a : put<T>(1) : 0;
}

// Floats and integers.
template <class T, Rounding R = rn> Bits<T> add_(Bits<T> a, Bits<T> b) {
    if constexpr (!real<T>) return a + b;
    else if constexpr (R == rn && !small<T>) return put<T>(get<T>(a) + get<T>(b));
    else return Type<T>::template round<R>(odd_sum(get<T>(a), get<T>(b)));
}
template <class T> Bits<T> neg_(Bits<T> a) {
    if constexpr (real<T>) return a ^ Bits<T>(1) << (width<T> - 1);
    else return -a;
}
template <class T> Bits<T> abs_(Bits<T> a) {
    if constexpr (real<T>) return a & ~(Bits<T>(1) << (width<T> - 1));
    else return get<T>(a) < 0 ? -a : a;
}
template <class T, Rounding R = rn> Bits<T> sub_(Bits<T> a, Bits<T> b) {
    if constexpr (!real<T>) return a - b;
    else return add_<T, R>(a, neg_<T>(b));
}
template <class T, Rounding R = rn> Bits<T> mul_(Bits<T> a, Bits<T> b) {
    if constexpr (R == rn && !small<T>) return put<T>(get<T>(a) * get<T>(b));
    else return Type<T>::template round<R>(double(get<T>(a)) * get<T>(b));  // exact in double
}
template <class T, Rounding R = rn> Bits<T> fma_(Bits<T> a, Bits<T> b, Bits<T> c) {
    if constexpr (R == rn && !small<T>) return put<T>(std::fma(get<T>(a), get<T>(b), get<T>(c)));
    else return Type<T>::template round<R>(odd_sum(double(get<T>(a)) * get<T>(b), get<T>(c)));
}
template <class T, Rounding R = rn> Bits<T> div_(Bits<T> a, Bits<T> b) {
    if constexpr (!real<T>) {
        if (!b) return ~Bits<T>(0);
        if (is_signed<T> && b == Bits<T>(-1)) return -a;
        return put<T>(get<T>(a) / get<T>(b));
    } else if constexpr (R == rn) {
        return put<T>(get<T>(a) / get<T>(b));
    } else {
        double x = get<T>(a), y = get<T>(b), quotient = x / y, rest = std::fma(-quotient, y, x);
        return Type<T>::template round<R>(odd(quotient, y < 0 ? -rest : rest));
    }
}
template <class T> Bits<T> rem_(Bits<T> a, Bits<T> b) {
    if (!b) return a;
    if (is_signed<T> && b == Bits<T>(-1)) return 0;
    return put<T>(get<T>(a) % get<T>(b));
}
template <class T, Rounding R = rn> Bits<T> rcp_(Bits<T> a) { return div_<T, R>(put<T>(1), a); }
template <class T, Rounding R = rn> Bits<T> sqrt_(Bits<T> a) {
    double x = get<T>(a), root = std::sqrt(x);
    if constexpr (R == rn) return put<T>(std::sqrt(get<T>(a)));
    else return Type<T>::template round<R>(odd(root, std::fma(-root, root, x)));
}
template <class T> Bits<T> rsqrt_(Bits<T> a) { return put<T>(1 / std::sqrt(double(get<T>(a)))); }
template <class T> Bits<T> ex2_(Bits<T> a) { return put<T>(std::exp2(get<T>(a))); }
template <class T> Bits<T> lg2_(Bits<T> a) { return put<T>(std::log2(get<T>(a))); }
template <class T> Bits<T> sin_(Bits<T> a) { return put<T>(std::sin(get<T>(a))); }
template <class T> Bits<T> cos_(Bits<T> a) { return put<T>(std::cos(get<T>(a))); }
template <class T> Bits<T> tanh_(Bits<T> a) { return put<T>(std::tanh(get<T>(a))); }
template <class T> Bits<T> copysign_(Bits<T> a, Bits<T> b) { return abs_<T>(b) | (a ^ abs_<T>(a)); }

template <class T, bool Less, bool NaN> Bits<T> pick(Bits<T> a, Bits<T> b) {
    auto x = get<T>(a), y = get<T>(b);
    if constexpr (real<T>) {
        if (x != x || y != y) return (NaN || (x != x && y != y)) ? put<T>(NAN) : x != x ? b : a;
        if (x == y) return std::signbit(x) == Less ? a : b;
    }
    return (x < y) == Less ? a : b;
}
template <class T, bool NaN = false> Bits<T> min_(Bits<T> a, Bits<T> b) { return pick<T, true, NaN>(a, b); }
template <class T, bool NaN = false> Bits<T> max_(Bits<T> a, Bits<T> b) { return pick<T, false, NaN>(a, b); }

// Comparisons: a NaN compares as false, with a u after the name as true.
template <class T> bool nan_(Bits<T> a, Bits<T> b) { return get<T>(a) != get<T>(a) || get<T>(b) != get<T>(b); }
template <class T> bool num_(Bits<T> a, Bits<T> b) { return !nan_<T>(a, b); }
template <class T> bool eq_(Bits<T> a, Bits<T> b) { return get<T>(a) == get<T>(b); }
template <class T> bool ne_(Bits<T> a, Bits<T> b) { return get<T>(a) != get<T>(b) && num_<T>(a, b); }
template <class T> bool lt_(Bits<T> a, Bits<T> b) { return get<T>(a) < get<T>(b); }
template <class T> bool le_(Bits<T> a, Bits<T> b) { return get<T>(a) <= get<T>(b); }
template <class T> bool gt_(Bits<T> a, Bits<T> b) { return get<T>(a) > get<T>(b); }
template <class T> bool ge_(Bits<T> a, Bits<T> b) { return get<T>(a) >= get<T>(b); }
template <class T> bool equ_(Bits<T> a, Bits<T> b) { return !ne_<T>(a, b); }
template <class T> bool neu_(Bits<T> a, Bits<T> b) { return !eq_<T>(a, b); }
template <class T> bool ltu_(Bits<T> a, Bits<T> b) { return !ge_<T>(a, b); }
template <class T> bool leu_(Bits<T> a, Bits<T> b) { return !gt_<T>(a, b); }
template <class T> bool gtu_(Bits<T> a, Bits<T> b) { return !le_<T>(a, b); }
template <class T> bool geu_(Bits<T> a, Bits<T> b) { return !lt_<T>(a, b); }

// Integers.
template <class T> using Wide = std::conditional_t<is_signed<T>, __int128, unsigned __int128>;
template <class T> Bits<T> mul_lo(Bits<T> a, Bits<T> b) { return Bits<T>(u64(a) * b); }
template <class T> Bits<T> mul_hi(Bits<T> a, Bits<T> b) { return Bits<T>(Wide<T>(get<T>(a)) * get<T>(b) >> width<T>); }
template <class T> u64 mul_wide(Bits<T> a, Bits<T> b) { return u64(Wide<T>(get<T>(a)) * get<T>(b)); }
template <class T> Bits<T> mul24_lo(Bits<T> a, Bits<T> b) {
    return mul_lo<T>(put<T>(get<T>(a << 8) >> 8), put<T>(get<T>(b << 8) >> 8));
}
template <class T> Bits<T> sad_(Bits<T> a, Bits<T> b, Bits<T> c) { return c + (lt_<T>(a, b) ? b - a : a - b); }
template <class T> Bits<T> and_(Bits<T> a, Bits<T> b) { return a & b; }
template <class T> Bits<T> or_(Bits<T> a, Bits<T> b) { return a | b; }
template <class T> Bits<T> xor_(Bits<T> a, Bits<T> b) { return a ^ b; }
template <class T> Bits<T> not_(Bits<T> a) {
    if constexpr (std::is_same_v<T, bool>) return !a;
    else return ~a;
}
template <class T> Bits<T> cnot_(Bits<T> a) { return !a; }
template <class T> Bits<T> shl_(Bits<T> a, u32 by) { return by < width<T> ? a << by : 0; }
template <class T> Bits<T> shr_(Bits<T> a, u32 by) { return put<T>(get<T>(a) >> std::min(by, width<T> - 1)) & (is_signed<T> || by < width<T> ? ~Bits<T>(0) : 0); }
template <class T> u32 popc_(Bits<T> a) { return std::popcount(a); }
template <class T> u32 clz_(Bits<T> a) { return std::countl_zero(a); }
template <class T> Bits<T> brev_(Bits<T> a) {
    Bits<T> reversed = 0;
    for (u32 i = 0; i < width<T>; i++) reversed |= (a >> i & 1) << (width<T> - 1 - i);
    return reversed;
}
template <class T, bool Shift = false> u32 bfind_(Bits<T> a) {
    if (is_signed<T> && get<T>(a) < 0) a = ~a;
    if (!a) return ~0u;
    u32 zeros = std::countl_zero(a);
    return Shift ? zeros : width<T> - 1 - zeros;
}
template <class T> Bits<T> bfe_(Bits<T> a, u32 from, u32 count) {
    from &= 0xff, count &= 0xff;
    bool sign = is_signed<T> && count && a >> std::min(from + count - 1, width<T> - 1) & 1;
    Bits<T> field = count < width<T> ? shl_<T>(1, count) - 1 : ~Bits<T>(0);
    Bits<T> there = from < width<T> ? ~Bits<T>(0) >> from : 0;  // bits of the field that `a` has
    Bits<T> value = shr_<Bits<T>>(a, from) & field;
    return sign ? value | ~(field & there) : value;
}
template <class T> Bits<T> bfi_(Bits<T> a, Bits<T> b, u32 to, u32 count) {
    to &= 0xff, count &= 0xff;
    Bits<T> field = shl_<T>(count < width<T> ? shl_<T>(1, count) - 1 : ~Bits<T>(0), to);
    return (b & ~field) | (shl_<T>(a, to) & field);
}
template <bool Clamp> u32 bmsk_(u32 from, u32 count) {
    u32 start = from & 31, end = start + (count & 31);
    bool over = end >= 32 || (Clamp && (from >= 32 || count >= 32));
    return Clamp && from >= 32 ? 0 : ~0u << start & ~(over ? 0 : ~0u << end);
}
template <class T, bool Clamp> u32 szext_(u32 a, u32 count) {
    if (Clamp && count >= 32) return a;
    count &= 31;
    u32 mask = ~0u << count;
    return is_signed<T> && count && a >> (count - 1) & 1 ? a | mask : a & ~mask;
}
inline u32 fns_(u32 mask, u32 base, s32 offset) {
    if (offset == 0) return mask >> base & 1 ? base : ~0u;
    s32 step = offset > 0 ? 1 : -1, left = std::abs(offset);
    for (s32 at = s32(base); at >= 0 && at < 32; at += step)
        if (mask >> at & 1 && --left == 0) return at;
    return ~0u;
}
template <u32 Lut> u32 lop3_(u32 a, u32 b, u32 c) {
    u32 result = 0;
    for (u32 i = 0; i < 8; i++)
        if (Lut >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return result;
}
template <bool Left, bool Wrap> u32 shf_(u32 low, u32 high, u32 by) {
    by = Wrap ? by & 31 : std::min(by, 32u);
    u64 both = u64(high) << 32 | low;
    return Left ? u32(both << by >> 32) : u32(both >> by);
}
inline u32 prmt_(u32 a, u32 b, u32 selector) {
    u64 both = u64(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; i++) {
        u32 nibble = selector >> 4 * i & 15, byte = u8(both >> 8 * (nibble & 7));
        if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}
// The selectors of prmt's modes, by the two low bits of its selector.
constexpr u32 f4e[] = {0x3210, 0x4321, 0x5432, 0x6543}, b4e[] = {0x5670, 0x6701, 0x7012, 0x0123};
constexpr u32 rc8[] = {0x0000, 0x1111, 0x2222, 0x3333}, ecl[] = {0x3210, 0x3211, 0x3222, 0x3333};
constexpr u32 ecr[] = {0x0000, 0x1110, 0x2210, 0x3210}, rc16[] = {0x1010, 0x3232, 0x1010, 0x3232};
template <class A, class B> u32 dp4a_(u32 a, u32 b, u32 c) {
    for (u32 i = 0; i < 32; i += 8) c += u32(s32(A(a >> i)) * s32(B(b >> i)));
    return c;
}
template <class T> Bits<T> inc(Bits<T> a, Bits<T> b) { return a >= b ? 0 : a + 1; }
template <class T> Bits<T> dec(Bits<T> a, Bits<T> b) { return !a || a > b ? b : a - 1; }
template <class T> Bits<T> exch(Bits<T>, Bits<T> b) { return b; }

// Conversions; the result of an integer type is that type's, and so extends to a wider register by its sign.
template <class D, class S, bool Sat = false> D cvt_int(Bits<S> a) {
    auto x = __int128(get<S>(a));
    if (Sat) x = std::clamp<__int128>(x, std::numeric_limits<D>::min(), std::numeric_limits<D>::max());
    return D(x);
}
template <Rounding R> double integral(double x) {
    return R == rn ? std::nearbyint(x) : R == rz ? std::trunc(x) : R == rm ? std::floor(x) : std::ceil(x);
}
template <class D, class S, Rounding R> D cvt_to_int(Bits<S> a) {
    double x = integral<R>(get<S>(a)), most = std::ldexp(1.0, 8 * sizeof(D) - is_signed<D>);
    if (x != x) return 0;
    if (x >= most) return std::numeric_limits<D>::max();
    return x <= (is_signed<D> ? -most : 0) ? std::numeric_limits<D>::min() : D(x);
}
template <class D, class S, Rounding R> Bits<D> cvt_from_int(Bits<S> a) {
    S x = get<S>(a);
    if constexpr (R == rn && !small<D>) return put<D>(typename std::conditional_t<std::is_same_v<D, f32>, f32, f64>(x));
    else return Type<D>::template round<R>(odd(double(x), double((long double)x - double(x))));
}
template <class D, class S, Rounding R, bool Satfinite = false> Bits<D> cvt_float(Bits<S> a) {
    double x = get<S>(a);
    if constexpr (Satfinite && small<D>) return []<int E, int M>(Small<E, M>, double x) { return Bits<D>(encode<E, M, R>(x, true)); }(D(), x);
    else return Type<D>::template round<R>(x);
}
template <class T, Rounding R> Bits<T> cvt_integral(Bits<T> a) { return put<T>(integral<R>(get<T>(a))); }
template <class T> Bits<T> relu(Bits<T> a) { return std::signbit(get<T>(a)) && get<T>(a) == get<T>(a) ? 0 : a; }
