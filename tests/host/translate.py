"""PTX to C++: a function for each entry, on top of arithmetic.h and machine.h.

A register becomes a local variable that holds its bits, an instruction a statement, a label a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

BITS = {"pred": 1, **{f"{kind}{size}": size for kind in "bus" for size in (8, 16, 32, 64)}, "f16": 16, "bf16": 16}
BITS |= {"f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32}
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "u16x2": "u16", "s16x2": "s16"}
FLOATS = {"f16", "bf16", "f32", "f64", "f16x2", "bf16x2"}
ROUNDINGS = ("rn", "rz", "rm", "rp")
SPACES = {"global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared_cluster"}
SPACES |= {"local": "local", "param": "param", "const": "global"}
ORDERED = ("volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
CACHE = re.compile(r"(L1|L2)::.*|c[agvs]|lu|w[bt]|nc|weak")
AXES = "xyz"

SPECIAL = {f"%{name}.{axis}": value.format(i) for i, axis in enumerate(AXES) for name, value in {
    "tid": "t.tid[{}]", "ntid": "t.launch.block[{}]", "ctaid": "t.block.ctaid[{}]", "nctaid": "t.launch.grid[{}]",
    "cluster_nctaid": "t.launch.cluster[{}]", "cluster_ctaid": "(t.block.ctaid[{0}] % t.launch.cluster[{0}])",
    "clusterid": "(t.block.ctaid[{0}] / t.launch.cluster[{0}])",
    "nclusterid": "(t.launch.grid[{0}] / t.launch.cluster[{0}])",
}.items()}  # fmt: skip
SPECIAL |= {
    "%laneid": "t.lane", "%warpid": "(t.index / 32)", "%nwarpid": "u32(t.block.warps.size())", "WARP_SZ": "32u",
    "%cluster_ctarank": "t.block.rank",
    "%cluster_nctarank": "(t.launch.cluster[0] * t.launch.cluster[1] * t.launch.cluster[2])",
    "%is_explicit_cluster": "true", "%smid": "0u", "%nsmid": "1u", "%gridid": "0u",
    "%lanemask_eq": "(1u << t.lane)", "%lanemask_lt": "((1u << t.lane) - 1)", "%lanemask_le": "(~0u >> (31 - t.lane))",
    "%lanemask_gt": "~(~0u >> (31 - t.lane))", "%lanemask_ge": "~((1u << t.lane) - 1)",
    "%clock": "u32(++t.machine.ticks)", "%clock_hi": "0u", "%clock64": "++t.machine.ticks",
    "%globaltimer": "(t.machine.ticks += 1000)", "%globaltimer_lo": "u32(t.machine.ticks += 1000)",
    "%dynamic_smem_size": "t.launch.smem", "%total_smem_size": "(t.machine.shared_end() - FIRST_SHARED)",
}  # fmt: skip


class Unsupported(ValueError):
    """PTX that the translator does not know; the message has the instruction."""


@dataclass
class Scope:
    """What a ``{ … }`` of PTX declares: register -> type, ``(prefix, count)`` ranges, labels, variables."""

    parent: Scope | None
    suffix: str
    registers: dict[str, str] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)
    tables: dict[str, list[str]] = field(default_factory=dict)

    def chain(self) -> Iterator[Scope]:
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.parent


@dataclass
class Entry:
    """A function while it is translated."""

    name: str
    params: list[str]
    symbols: dict[str, str]  # of variables: their addresses
    registers: dict[str, str] = field(default_factory=dict)  # those used: C++ name -> type

    def register(self, scope: Scope, name: str) -> tuple[str, str] | None:
        """C++ name and type of a register; None where there is none of that name."""
        prefix = name.rstrip("0123456789")
        for each in scope.chain():
            count, kind = each.ranges.get(prefix, (0, ""))
            found = each.registers.get(name) or (kind if name != prefix and int(name[len(prefix) :]) < count else None)
            if found:
                mangled = f"r_{_identifier(name.lstrip('%'))}{each.suffix}"
                self.registers[mangled] = found
                return mangled, found
        return None


@dataclass
class Instruction:
    """An instruction: `parts` are the qualifiers that no one has taken yet, `args` the operands as written."""

    entry: Entry
    scope: Scope
    text: str
    opcode: str
    parts: list[str]
    args: list[str]

    def unsupported(self) -> Unsupported:
        return Unsupported(f"{self.entry.name}: {self.text}")

    def take(self, *names: str, default: str = "") -> str:
        """The first of the qualifiers that is among `names`, which is then gone."""
        for part in self.parts:
            if part in names:
                self.parts.remove(part)
                return part
        return default

    def type(self) -> str:
        """The last qualifier, a type."""
        if not self.parts or self.parts[-1] not in BITS:
            raise self.unsupported()
        return self.parts.pop()

    def memory(self) -> tuple[str, bool]:
        """The space, and whether other threads take part in the access; cache hints are dropped."""
        ordered = bool(self.take(*ORDERED))
        self.take(*SCOPES)
        self.parts = [part for part in self.parts if not CACHE.fullmatch(part)]
        space = self.take(*SPACES)
        return SPACES.get(space, "generic"), ordered

    def value(self, arg: str) -> str:
        """The C++ expression of an operand."""
        if arg.startswith("!"):
            return f"!{self.value(arg[1:])}"
        if arg in SPECIAL:
            return SPECIAL[arg]
        register = self.entry.register(self.scope, arg)
        if register:
            return register[0]
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", arg):
            return f"0x{match[1]}u"
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", arg):
            return f"0x{match[1]}ull"
        if match := re.fullmatch(r"(-?)(0[xX][0-9a-fA-F]+|\d+)U?", arg):
            number = int(match[2], 8 if re.fullmatch(r"0\d+", match[2]) else 0)
            return f"{(-number if match[1] else number) % 2**64:#x}ull"
        if match := re.fullmatch(r"([\w$]+)\s*\+\s*(\d+)", arg):
            return f"({self.value(match[1])} + {match[2]})"
        if arg in self.entry.symbols:
            return self.entry.symbols[arg]
        if arg in self.entry.params:
            return f"u64(t.launch.params[{self.entry.params.index(arg)}])"
        raise self.unsupported()

    def kind(self, arg: str) -> str:
        """The type of the register `arg`."""
        register = self.entry.register(self.scope, arg)
        if not register:
            raise self.unsupported()
        return register[1]

    def values(self, start: int = 1) -> list[str]:
        return [self.value(arg) for arg in self.args[start:]]

    def address(self, arg: str) -> str:
        """The C++ expression of ``[base + offset]``."""
        match = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]", arg)
        if not match:
            raise self.unsupported()
        base = self.value(match[1])
        return f"{base} + s64({int(match[2], 0)})" if match[2] else base

    def set(self, arg: str, value: str) -> str:
        """Assign to the operand `arg`; ``_`` drops the value."""
        if arg == "_":
            return f"{value};"
        register = self.entry.register(self.scope, arg)
        if not register:
            raise self.unsupported()
        return f"{register[0]} = {value};"

    def label(self, name: str) -> str:
        for scope in self.scope.chain():
            if name in scope.labels:
                return f"L_{_identifier(name)}{scope.suffix}"
        raise self.unsupported()

    def elements(self, arg: str) -> list[str]:
        """The operands of ``{a, b}``, or the one operand."""
        return [part.strip() for part in arg[1:-1].split(",")] if arg.startswith("{") else [arg]


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _call(name: str, kind: str, args: list[str], *flags: str) -> str:
    """A call of an operation, on both halves of a packed type."""
    function = f"{name}<{', '.join((PACKED.get(kind, kind), *flags))}>"
    if kind in PACKED:
        return f"x2({function}, {', '.join(f'u32({arg})' for arg in args)})"
    return f"{function}({', '.join(args)})"


def _arithmetic(ins: Instruction) -> str:
    """Operations whose C++ function has their name; qualifiers are the rounding, ftz, sat, NaN and approx."""
    kind, name = ins.type(), ins.opcode
    rounding = ins.take(*ROUNDINGS)
    flush, saturate, relu = ins.take("ftz"), ins.take("sat"), ins.take("relu")
    ins.take("approx", "full")
    ins.take("noftz")
    args = ins.values()
    if kind in FLOATS:
        name = {"mad": "fma"}.get(name, name)
        scalar = PACKED.get(kind, kind)
        if flush:
            args = [_call("ftz", kind, [arg]) for arg in args]
        flags = [rounding] if name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt") and rounding else []
        flags += ["true"] if ins.take("NaN") else []
        result = _call(f"{name}_", kind, args, *flags)
        for wanted, function in ((flush, "ftz"), (saturate, "sat01"), (relu, "relu")):
            if wanted:
                result = f"x2({function}<{scalar}>, {result})" if kind in PACKED else f"{function}<{kind}>({result})"
        return ins.set(ins.args[0], result)
    if saturate:
        wide = [f"s64(s32({arg}))" for arg in args]
        if kind != "s32" or name not in ("add", "sub"):
            raise ins.unsupported()
        return ins.set(ins.args[0], f"u32(cvt_int<s32, s64, true>({wide[0]} {'+-'[name == 'sub']} {wide[1]}))")
    result = _call(f"{name}_", kind, args)
    return ins.set(ins.args[0], f"relu<{kind}>({result})" if relu else result)


def _carry(ins: Instruction) -> str:
    """add and sub with a carry out of (``.cc``) or into (addc, subc) them."""
    carries = ins.take("cc")
    if not carries and ins.opcode in ("add", "sub"):
        return _arithmetic(ins)
    kind = ins.type()
    a, b = (f"(unsigned __int128)Bits<{kind}>({value})" for value in ins.values())
    minus = ins.opcode.startswith("sub")
    carry = "t.carry" if ins.opcode.endswith("c") else "0"
    keep = f"t.carry = sum >> {BITS[kind]} & 1; " if carries else ""
    result = ins.set(ins.args[0], f"Bits<{kind}>(sum)")
    sign = "-" if minus else "+"
    return f"{{ auto sum = {a} {sign} {b} {sign} {carry}; {keep}{result} }}"


def _multiply(ins: Instruction) -> str:
    """mul, mad, mul24, mad24: integers by lo, hi or wide."""
    if ins.parts[-1] in FLOATS:
        return _arithmetic(ins)
    kind, part = ins.type(), ins.take("lo", "hi", "wide")
    args = ins.values()
    if not part or ("24" in ins.opcode and part != "lo"):
        raise ins.unsupported()
    name = f"mul{'24' if '24' in ins.opcode else ''}_{part}"
    result = f"{name}<{kind}>({', '.join(args[:2])})"
    carries = ins.take("cc")
    if ins.opcode.startswith("mad"):
        if carries or ins.opcode == "madc":
            carry = "t.carry" if ins.opcode == "madc" else "0"
            keep = f"t.carry = sum >> {BITS[kind]} & 1; " if carries else ""
            sum = f"(unsigned __int128){result} + Bits<{kind}>({args[2]}) + {carry}"
            return f"{{ auto sum = {sum}; {keep}{ins.set(ins.args[0], f'Bits<{kind}>(sum)')} }}"
        result = f"{result} + {args[2]}"
    return ins.set(ins.args[0], result)


def _typed(*flags: str) -> Callable[[Instruction], str]:
    """Operations of a type alone; each of `flags` is a qualifier that is a boolean template argument."""

    def translate(ins: Instruction) -> str:
        kind = ins.type()
        given = ["true" if ins.take(flag) else "false" for flag in flags]
        return ins.set(ins.args[0], _call(f"{ins.opcode}_", kind, ins.values(), *given))

    return translate


def _mov(ins: Instruction) -> str:
    kind = ins.type()
    to, source = ins.args
    if to.startswith("{"):
        parts = ins.elements(to)
        size = BITS[kind] // len(parts)
        wide = f"u64({ins.value(source)})"
        return " ".join(ins.set(p, f"u{size}({wide} >> {size * i})") for i, p in enumerate(parts) if p != "_")
    if source.startswith("{"):
        parts = ins.elements(source)
        size = BITS[kind] // len(parts)
        return ins.set(to, " | ".join(f"u64(u{size}({ins.value(part)})) << {size * i}" for i, part in enumerate(parts)))
    return ins.set(to, ins.value(source))


def _condition(ins: Instruction, kind: str, args: list[str]) -> str:
    comparison = ins.take(*COMPARISONS)
    flush = ins.take("ftz")
    if not comparison:
        raise ins.unsupported()
    if kind[0] != "f" and kind != "bf16":
        comparison = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(comparison, comparison)
    if flush:
        args = [f"ftz<{kind}>({arg})" for arg in args]
    return f"{comparison}_<{kind}>({', '.join(args)})"


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu")
COMPARISONS += ("num", "nan")


def _setp(ins: Instruction) -> str:
    kind, combine = ins.type(), ins.take("and", "or", "xor")
    targets = ins.args[0].split("|")
    args = ins.values()
    scalar = PACKED.get(kind, kind)
    if kind in PACKED:  # one predicate a half
        low = _condition(ins, scalar, [f"u16({arg})" for arg in args[:2]])
        high = re.sub(r"u16\(([^)]*)\)", r"u16(\1 >> 16)", low)
        results = [low, high]
    else:
        truth = _condition(ins, scalar, args[:2])
        results = [truth, f"!{truth}"]
    if combine:
        operator = {"and": "&", "or": "|", "xor": "^"}[combine]
        results = [f"({result}) {operator} ({args[2]})" for result in results]
    chosen = [f"bool v{i} = {result};" for i, (result, _) in enumerate(zip(results, targets, strict=False))]
    return " ".join(["{", *chosen, *(ins.set(to.strip(), f"v{i}") for i, to in enumerate(targets)), "}"])


def _set(ins: Instruction) -> str:
    kind = ins.type()
    to = ins.type()
    truth = _condition(ins, kind, ins.values())
    return ins.set(ins.args[0], f"{truth} ? {'0x3f800000u' if to == 'f32' else '~0u'} : 0")


def _selp(ins: Instruction) -> str:
    ins.type()
    a, b, choice = ins.values()
    return ins.set(ins.args[0], f"{choice} ? {a} : {b}")


def _slct(ins: Instruction) -> str:
    choice, _ = ins.type(), ins.type()
    ins.take("ftz")
    a, b, c = ins.values()
    return ins.set(ins.args[0], f"ge_<{choice}>({c}, 0) ? {a} : {b}")


def _cvt(ins: Instruction) -> str:
    """Conversions. Packed results take the high half first; e4m3 and e5m2 come in pairs."""
    pairs = {"e4m3x2": "e4m3", "e5m2x2": "e5m2", "f16x2": "f16", "bf16x2": "bf16"}
    kinds = {**{kind: kind for kind in BITS}, **pairs}
    if len(ins.parts) < 2 or not {*ins.parts[-2:]} <= kinds.keys():
        raise ins.unsupported()
    source, to = ins.parts.pop(), ins.parts.pop()
    d, s = kinds[to], kinds[source]
    rounding, whole = ins.take(*ROUNDINGS), ins.take(*(f"{rounding}i" for rounding in ROUNDINGS))
    flush, saturate, satfinite, relu = ins.take("ftz"), ins.take("sat"), ins.take("satfinite"), ins.take("relu")
    args = [f"ftz<{s}>({arg})" if flush and s == "f32" else arg for arg in ins.values()]

    def convert(arg: str) -> str:
        if s in BITS and s not in FLOATS and d not in FLOATS and d in BITS:
            return f"cvt_int<{d}, {s}, {'true' if saturate else 'false'}>({arg})"
        if d in BITS and d not in FLOATS:
            return f"cvt_to_int<{d}, {s}, {(whole or rounding)[:2]}>({arg})"
        if s in BITS and s not in FLOATS:
            result = f"cvt_from_int<{d}, {s}, {rounding or 'rn'}>({arg})"
        elif whole:
            if d != s:
                raise ins.unsupported()
            result = f"cvt_integral<{d}, {whole[:2]}>({arg})"
        else:
            result = f"cvt_float<{d}, {s}, {rounding or 'rn'}{', true' if satfinite else ''}>({arg})"
        for wanted, function in ((flush and d == "f32", "ftz"), (saturate, "sat01"), (relu, "relu")):
            result = f"{function}<{d}>({result})" if wanted else result
        return result

    if source in pairs and to in pairs:  # e4m3x2 to f16x2, and back
        narrow, wide = BITS.get(source, 16) // 2, BITS.get(to, 16) // 2
        halves = [convert(f"u{narrow}(u32({args[0]}) >> {shift})") for shift in (narrow, 0)]
        return ins.set(ins.args[0], f"u32({halves[0]}) << {wide} | {halves[1]}")
    if to in pairs:
        high, low = map(convert, args)
        return ins.set(ins.args[0], f"u32({high}) << {BITS.get(to, 16) // 2} | {low}")
    return ins.set(ins.args[0], convert(args[0]))


def _ld(ins: Instruction) -> str:
    kind = ins.type()
    vector = ins.take("v2", "v4", "v8")
    space, ordered = ins.memory()
    parts = ins.elements(ins.args[0])
    address = ins.address(ins.args[1])
    if space == "param" and (match := re.fullmatch(r"\[([\w$]+)(?:\+(\d+))?\]", ins.args[1])):
        address = f"u64(t.launch.params[{ins.entry.params.index(match[1])}]) + {match[2] or 0}"
    loads = " ".join(ins.set(part, f"p[{i}]") for i, part in enumerate(parts) if part != "_")
    if vector and len(parts) != int(vector[1]):
        raise ins.unsupported()
    spin = "t.spin(); " if ordered else ""
    return f'{{ {spin}auto *p = t.at<{kind}>({space}, {address}, "reads", {len(parts)}); {loads} }}'


def _st(ins: Instruction) -> str:
    kind = ins.type()
    ins.take("v2", "v4", "v8")
    space, _ = ins.memory()
    parts = ins.elements(ins.args[1])
    stores = " ".join(f"p[{i}] = {ins.value(part)};" for i, part in enumerate(parts))
    return f'{{ auto *p = t.at<{kind}>({space}, {ins.address(ins.args[0])}, "writes", {len(parts)}); {stores} }}'


def _atom(ins: Instruction) -> str:
    kind = ins.type()
    space, _ = ins.memory()
    ins.take("noftz")
    operation = ins.take("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
    to, address, *operands = ins.args if ins.opcode == "atom" else ["_", *ins.args]
    values = [ins.value(operand) for operand in operands[: 1 + (operation == "cas")]]
    if not operation:
        raise ins.unsupported()
    if operation == "cas":
        update = f"old == Bits<{kind}>({values[0]}) ? Bits<{kind}>({values[1]}) : old"
    else:
        name = operation if operation in ("exch", "inc", "dec") else f"{operation}_"
        update = _call(name, kind, ["old", values[0]])
    word = "b32" if kind in PACKED else kind
    function = f"[&](Bits<{word}> old) -> Bits<{word}> {{ return {update}; }}"
    return ins.set(to, f"t.atomic<{word}>({space}, {ins.address(address)}, {function})")


def _barrier(ins: Instruction) -> str:
    """bar and barrier: of the block, of the cluster, of the lanes of a warp."""
    ins.take("aligned")
    ins.take("cta")
    if ins.take("cluster"):
        action = ins.take("arrive", "wait")
        ins.take("relaxed", "release", "acquire")
        return f"t.cluster_{action}();"
    if ins.take("warp"):
        ins.take("sync")
        return f"t.sync({ins.value(ins.args[0])});"
    action = ins.take("sync", "arrive", "red")
    if action == "red":
        how = ins.take("popc", "and", "or")
        ins.type()
        to, id, *count, vote = ins.args
        result = {"popc": "t.said", "and": "t.said == t.out_of", "or": "t.said != 0"}[how]
        threads = ins.value(count[0]) if count else "0"
        return f't.barrier({ins.value(id)}, {threads}, true, {ins.value(vote)}, "bar.red"); {ins.set(to, result)}'
    id, threads = [*ins.values(0), "0"][:2]
    return f't.barrier({id}, {threads}, {"true" if action == "sync" else "false"}, false, "bar.sync");'


def _shfl(ins: Instruction) -> str:
    ins.take("sync")
    ins.take("b32")
    mode = ins.take("up", "down", "bfly", "idx")
    to, _, inside = ins.args[0].partition("|")
    assigned = ins.set(inside, "inside") if inside else ""
    value = ins.set(to, f"t.shfl({mode}, {', '.join(ins.values())}, inside)")
    return f"{{ bool inside; {value} {assigned} }}"


def _vote(ins: Instruction) -> str:
    ins.take("sync")
    ins.take("pred", "b32")
    how = ins.take("all", "any", "uni", "ballot")
    return ins.set(ins.args[0], f"t.{how if how == 'ballot' else f'vote_{how}'}({', '.join(ins.values())})")


def _match(ins: Instruction) -> str:
    kind = ins.type()
    ins.take("sync")
    to, _, all = ins.args[0].partition("|")
    value, mask = ins.values()
    value = f"Bits<{kind}>({value})"
    if ins.take("any"):
        return ins.set(to, f"t.match_any({value}, {mask})")
    ins.take("all")
    return f"{{ bool all; {ins.set(to, f't.match_all({value}, {mask}, all)')} {ins.set(all, 'all') if all else ''} }}"


def _redux(ins: Instruction) -> str:
    kind = ins.type()
    ins.take("sync")
    operation = ins.take("add", "min", "max", "and", "or", "xor")
    return ins.set(ins.args[0], f"t.redux({operation}_<{kind}>, {', '.join(ins.values())})")


def _elect(ins: Instruction) -> str:
    ins.take("sync")
    to, _, leader = ins.args[0].partition("|")
    return f"{{ bool leader; {ins.set(to, f't.elect({ins.value(ins.args[1])}, leader)')} {ins.set(leader, 'leader')} }}"


def _cvta(ins: Instruction) -> str:
    ins.type()
    to = ins.take("to")
    space = SPACES[ins.take(*SPACES)]
    return ins.set(ins.args[0], f"t.{'from' if to else 'to'}_generic({space}, {ins.value(ins.args[1])})")


def _isspacep(ins: Instruction) -> str:
    return ins.set(ins.args[0], f"t.is_space({SPACES[ins.take(*SPACES)]}, {ins.value(ins.args[1])})")


def _rank(ins: Instruction) -> str:
    """mapa and getctarank."""
    ins.type()
    whole = "false" if ins.take("shared::cluster") else "true"
    name = "map_rank" if ins.opcode == "mapa" else "rank_of"
    return ins.set(ins.args[0], f"t.{name}({whole}, {', '.join(ins.values())})")


def _prmt(ins: Instruction) -> str:
    ins.take("b32")
    a, b, selector = ins.values()
    mode = ins.take("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    return ins.set(ins.args[0], f"prmt_({a}, {b}, {f'{mode}[{selector} & 3]' if mode else selector})")


def _lop3(ins: Instruction) -> str:
    ins.take("b32")
    *args, table = ins.values()
    return ins.set(ins.args[0], f"lop3_<{table}>({', '.join(args)})")


def _shf(ins: Instruction) -> str:
    ins.take("b32")
    left, wrap = ins.take("l", "r") == "l", ins.take("wrap", "clamp") == "wrap"
    return ins.set(ins.args[0], f"shf_<{int(left)}, {int(wrap)}>({', '.join(ins.values())})")


def _width(ins: Instruction) -> str:
    """bmsk and szext: a width that is too large is clamped, or wraps."""
    kind, clamp = ins.type(), ins.take("clamp", "wrap") == "clamp"
    flags = [kind] * (ins.opcode == "szext") + [str(clamp).lower()]
    return ins.set(ins.args[0], f"{ins.opcode}_<{', '.join(flags)}>({', '.join(ins.values())})")


def _dp4a(ins: Instruction) -> str:
    signs = [{"u32": "u8", "s32": "s8"}[kind] for kind in (ins.type(), ins.type())][::-1]
    return ins.set(ins.args[0], f"dp4a_<{', '.join(signs)}>({', '.join(ins.values())})")


def _fns(ins: Instruction) -> str:
    ins.take("b32")
    return ins.set(ins.args[0], f"fns_({', '.join(ins.values())})")


def _bra(ins: Instruction) -> str:
    ins.take("uni")
    return f"goto {ins.label(ins.args[0])};"


def _brx(ins: Instruction) -> str:
    ins.take("idx")
    ins.take("uni")
    index, table = ins.args
    targets = next(scope.tables[table] for scope in ins.scope.chain() if table in scope.tables)
    cases = " ".join(f"case {i}: goto {ins.label(target)};" for i, target in enumerate(targets))
    return f"switch ({ins.value(index)}) {{ {cases} }}"


def _cp(ins: Instruction) -> str:
    """The copies of cp.async without bulk: made at once, so waiting for them is nothing."""
    if not ins.take("async") or "bulk" in ins.parts or "mbarrier" in ins.parts:
        raise ins.unsupported()
    if ins.take("commit_group", "wait_group", "wait_all"):
        return ";"
    ins.memory()
    ins.parts = [part for part in ins.parts if part not in SPACES]
    to, source, size, *given = ins.args
    bytes = ins.value(given[0]) if given and int(size) >= 4 else size
    return f"t.copy_async({ins.address(to)}, {ins.address(source)}, {size}, {bytes});"


def _always(statement: str) -> Callable[[Instruction], str]:
    """Instructions that are the same statement whatever their operands."""

    def translate(ins: Instruction) -> str:
        ins.parts.clear()
        return statement

    return translate


def _constant(value: str) -> Callable[[Instruction], str]:
    """Instructions that set their first operand and have no other effect."""

    def translate(ins: Instruction) -> str:
        ins.parts.clear()
        return ins.set(ins.args[0], value)

    return translate


INSTRUCTIONS: dict[str, Callable[[Instruction], str]] = {
    **dict.fromkeys(("add", "sub", "addc", "subc"), _carry),
    **dict.fromkeys(("mul", "mad", "mul24", "mad24", "madc"), _multiply),
    **dict.fromkeys(("fma", "div", "rem", "abs", "neg", "min", "max", "rcp", "sqrt", "rsqrt"), _arithmetic),
    **dict.fromkeys(("sin", "cos", "lg2", "ex2", "tanh"), _arithmetic),
    **dict.fromkeys(("and", "or", "xor", "not", "cnot", "shl", "shr", "sad", "bfe", "bfi", "brev"), _typed()),
    **dict.fromkeys(("clz", "popc", "copysign"), _typed()),
    "bfind": _typed("shiftamt"), "bmsk": _width, "szext": _width, "fns": _fns,
    "prmt": _prmt, "lop3": _lop3, "shf": _shf, "dp4a": _dp4a,
    "mov": _mov, "setp": _setp, "set": _set, "selp": _selp, "slct": _slct, "cvt": _cvt,
    "ld": _ld, "ldu": _ld, "st": _st, "atom": _atom, "red": _atom, "cp": _cp,
    "cvta": _cvta, "isspacep": _isspacep, "mapa": _rank, "getctarank": _rank,
    "bar": _barrier, "barrier": _barrier, "shfl": _shfl, "vote": _vote, "match": _match, "redux": _redux,
    "elect": _elect, "activemask": _constant("1u << t.lane"), "createpolicy": _constant("0"),
    "bra": _bra, "brx": _brx, "ret": _always("return;"), "exit": _always("return;"),
    "trap": _always('t.fault("traps");'), "nanosleep": _always("t.spin();"),
    **dict.fromkeys(("membar", "fence", "griddepcontrol", "prefetch", "prefetchu"), _always(";")),
    **dict.fromkeys(("discard", "applypriority"), _always(";")),
}  # fmt: skip


# The text.


@dataclass
class Variable:
    """A variable: its space, alignment and size in bytes (0: as large as the launch says), and its C++ initializer."""

    name: str
    space: str
    align: int
    size: int
    content: str


_DECLARATION = re.compile(
    r"(?:\.(?:visible|weak|extern|common)\s+)*\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?(?:\.attribute\([^)]*\)\s*)?"
    r"(?:\.v([24])\s+)?\.(\w+)\s+([\w$]+)((?:\[\d*\])*)(?:\s*=\s*(.*))?",
    re.DOTALL,
)


def _variable(statement: str) -> Variable:
    match = _DECLARATION.fullmatch(statement)
    if not match:
        raise Unsupported(statement)
    space, align, vector, kind, name, extents, content = match.groups()
    item, count = BITS[kind] // 8 * int(vector or 1), 1
    for extent in re.findall(r"\[(\d*)\]", extents):
        count *= int(extent or 0)
    values = ""
    if content:
        numbers = [text.strip() for text in content.strip("{} \n").replace("{", "").replace("}", "").split(",")]
        if not all(
            re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+)", n) for n in numbers
        ):
            raise Unsupported(statement)
        bits = [int(re.sub(r"0[fFdD]", "0x", number), 0) % (1 << BITS[kind]) for number in numbers]
        values = ", ".join(map(str, b"".join(value.to_bytes(BITS[kind] // 8, "little") for value in bits)))
    return Variable(name, space, int(align or item), item * count, values)


_STATEMENT = re.compile(r"\s*(?:([%\w$]+):(?!:)|([{}])|([^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)")


def _statements(text: str) -> Iterator[tuple[str, str]]:
    """("label", name), ("scope", brace) and ("statement", text) of a function's body."""
    at, text = 0, text.rstrip()
    while at < len(text):
        match = _STATEMENT.match(text, at)
        if not match:
            raise Unsupported(text[at : at + 100])
        at = match.end()
        label, brace, statement = match.groups()
        yield ("label", label) if label else ("scope", brace) if brace else ("statement", " ".join(statement.split()))


def _operands(text: str) -> list[str]:
    """Split at the commas outside of braces, brackets and parentheses."""
    parts = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,])+", text)
    return [part.strip() for part in parts]


def _close(text: str, start: int) -> int:
    """The place of the brace that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return start + match.start()
    raise Unsupported("a brace that is never closed")


def _declare(scope: Scope, statement: str) -> None:
    """``.reg``: names, or ``%r<5>`` for %r0 to %r4."""
    match = re.fullmatch(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.*)", statement)
    if not match or match[1] not in BITS:
        raise Unsupported(statement)
    for name in map(str.strip, match[2].split(",")):
        if many := re.fullmatch(r"(.*)<(\d+)>", name):
            scope.ranges[many[1]] = (int(many[2]), match[1])
        else:
            scope.registers[name] = match[1]


def _body(entry: Entry, text: str, variables: list[Variable]) -> Iterator[str]:
    """The statements of a function as C++, and its variables into `variables`."""
    scope = Scope(None, "")
    read: list[tuple[Scope, str, str]] = []
    scopes = 0
    for what, content in _statements(text):
        if content == "{":
            scopes += 1
            scope = Scope(scope, f"_s{scopes}")
        elif content == "}":
            assert scope.parent
            scope = scope.parent
        elif what == "label":
            scope.labels.add(content)
            read.append((scope, what, content))
        elif content.startswith(".reg"):
            _declare(scope, content)
        elif content.startswith((".shared", ".local", ".global", ".const", ".extern")):
            variables.append(_variable(content))
        elif content.startswith((".loc", ".file", ".pragma")) or not content:
            continue
        elif content.startswith(".branchtargets"):
            last, _, label = read.pop()
            last.tables[label] = [name.strip() for name in content.removeprefix(".branchtargets").split(",")]
        else:
            read.append((scope, what, content))
    _place(entry, variables)
    seen: set[str] = set()
    for each, what, content in read:
        if what == "label":
            name = f"L_{_identifier(content)}{each.suffix}"
            seen.add(name)
            yield f"{name}:;"
            continue
        match = re.fullmatch(r"(?:@(!?)(%?[\w$]+)\s+)?([\w.:]+)\s*(.*)", content, re.DOTALL)
        if not match:
            raise Unsupported(f"{entry.name}: {content}")
        negated, guard, opcode, operands = match.groups()
        name, *parts = re.split(r"(?<!:)\.(?!:)", opcode)
        ins = Instruction(entry, each, content, name, parts, _operands(operands))
        if name not in INSTRUCTIONS:
            raise ins.unsupported()
        try:
            statement = INSTRUCTIONS[name](ins)
        except (IndexError, KeyError, StopIteration) as error:
            raise ins.unsupported() from error
        if ins.parts:
            raise ins.unsupported()
        if statement.startswith("goto") and statement[5:-1] in seen:
            statement = f"{{ t.loop(); {statement} }}"
        yield f"if ({negated}{ins.value(guard)}) {{ {statement} }}" if guard else statement


def _place(entry: Entry, variables: list[Variable]) -> None:
    """Addresses of the variables; shared memory has the static ones first, and then the launch's."""
    end = 1024  # machine.h: FIRST_SHARED
    for variable in sorted(variables, key=lambda variable: variable.size == 0):
        if variable.space == "shared":
            at = -(-end // variable.align) * variable.align
            entry.symbols[variable.name] = f"{at}u"
            end = at + variable.size
        else:
            entry.symbols[variable.name] = f"u64({_identifier(variable.name)})"
    entry.symbols["."] = str(end)


def _memory(variable: Variable) -> str:
    values = f" = {{{variable.content}}}" if variable.content else ""
    return f"alignas({variable.align}) u8 {_identifier(variable.name)}[{max(variable.size, 1)}]{values};"


def translate(ptx: str) -> str:
    """C++ with a ``launch_<entry>`` for every entry of `ptx`.

    Raises:
        Unsupported: it has an instruction or a declaration that the translator does not know.
    """
    ptx = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.DOTALL)
    module: list[Variable] = []
    functions: list[str] = []
    at = 0
    head = re.compile(
        r"(?:\.visible\s+|\.weak\s+)*\.(entry|func)\b[^{]*|(?:\.\w+\s+)*\.(?:shared|global|const)\b[^;]*;"
    )
    while match := head.search(ptx, at):
        if match[0].endswith(";"):
            module.append(_variable(match[0][:-1].strip()))
            at = match.end()
            continue
        if match[1] == "func":
            raise Unsupported(match[0].strip())
        close = _close(ptx, match.end())
        name = re.search(r"\.entry\s+([\w$]+)", match[0])[1]
        params = re.findall(r"\.param\s[^,()]*?([\w$]+)(?:\[\d+\])?\s*(?=[,)])", match[0])
        entry, variables = Entry(name, params, {}), list(module)
        body = list(_body(entry, ptx[match.end() + 1 : close], variables))
        functions.append(_function(entry, body, variables[len(module) :], module))
        at = close + 1
    globals = [f"static {_memory(variable)}" for variable in module if variable.space != "shared"]
    return "\n".join(['#include "machine.h"', *globals, *functions, ""])


def _function(entry: Entry, body: list[str], own: list[Variable], module: list[Variable]) -> str:
    registers: dict[str, list[str]] = {}
    for name, kind in entry.registers.items():
        registers.setdefault("bool" if kind == "pred" else f"u{BITS[kind]}", []).append(name)
    locals = [variable for variable in own if variable.space == "local"]
    lines = [f"    {kind} {', '.join(names)};" for kind, names in registers.items()]
    lines += [f"    {_memory(variable)}" for variable in locals]
    if len(locals) > 1:
        raise Unsupported(f"{entry.name}: more than one local array")
    for variable in locals:
        lines.append(f"    t.locals = {{u64({variable.name}), u64({variable.name}) + {variable.size}}};")
    known = [variable for variable in module if variable.space != "shared"]
    ranges = ", ".join(f"{{u64({_identifier(v.name)}), u64({_identifier(v.name)}) + {v.size}}}" for v in known)
    name = entry.name
    return "\n".join([
        f"static void body_{name}(Thread &t) {{", *lines, *(f"    {line}" for line in body), "}",
        f'extern "C" void launch_{name}(const Launch *launch) {{',
        f"    const Range variables[] = {{{ranges}{', ' if ranges else ''}{{}}}};",
        f'    launch_kernel({{"{name}", body_{name}, {entry.symbols["."]}, variables, {len(known)}}}, *launch);',
        "}",
    ])  # fmt: skip
