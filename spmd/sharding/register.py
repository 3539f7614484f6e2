"""Rules that users register for ops of their own, or in place of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, overload

import torch
import torch.fx as fx

from spmd._torch import CustomOpDef, FunctionSchema, OpOverload, OpOverloadPacket, tree_leaves
from spmd.errors import Offence, PlacementError
from spmd.graph.provenance import where
from spmd.sharding.rule import Call, Rule, Shape, labelled

Op = OpOverload | OpOverloadPacket | CustomOpDef | str
Entry = Callable[[Call], Rule | None]
F = TypeVar("F", bound=Entry)

RULES: dict[str, Entry] = {}  # by "ns.name" for all overloads of an op, by "ns.name.overload" for one
REDUCTIONS = ("sum", "max", "min")
GRAMMAR = 'write "n f, f -> n f": a name for each dim, `_` where it can\'t be split, `*` for any layout, `()` for a scalar, `| sum n` where n is summed over'


@overload
def register_rule(op: Op, rule: str | Entry) -> None: ...


@overload
def register_rule(op: Op) -> Callable[[F], F]: ...


def register_rule(op: Op, rule: str | Entry | None = None) -> Any:
    """Say how an op may be split over ranks. Without a rule, discovery runs a custom op on parts to find one, or its inputs are gathered.

    Args:
        op: an op of `torch.ops` (one overload or all of them), what `torch.library.custom_op` gave, or its name "ns::name".
        rule: a line, or a function of one call. The line names the dims of every tensor argument, then of every result:

                "n f, f -> n f"             a dim with a name may be split; results that have the name are split there too
                "n _, n -> n"               `_` can't be split
                "... f, f -> ... f"         `...` is any number of dims, each of which may be split
                "n o, n i -> o i | sum n"   a name that a result lacks: it's summed (or `max`, `min`) over the ranks
                "n f, () -> n f"            a tensor without dims
                "n f, * -> n f"             `*`: only the shape of this argument matters, any layout will do

            An argument that is a list of tensors, or may be None, counts once. A function gets a `Call` (names, arguments, shapes) and returns a
            `Rule`, most easily made by `labelled`, or None where that call has to run on whole inputs. Left out: register_rule decorates one.

    The last rule registered for an op counts, and only for what is compiled after. Its results are held to the traced shapes and types whenever
    it's used; `check_rule` holds it to real data.

    Raises:
        PlacementError: there is no such op, or the line doesn't fit it.

    Example:
        register_rule("mylib::scale_rows", "n f, n -> n f")

        @register_rule("mylib::pad_last")
        def pad_last(call: Call) -> Rule | None:
            return labelled([["n", None]], [["n", None]], linear=((0,),))
    """
    if rule is None:

        def decorate(function: F) -> F:
            register_rule(op, function)
            return function

        return decorate
    key, schemas = resolve(op)
    RULES[key] = rule if callable(rule) else Annotation.parse(key, rule, schemas)
    return None


def registered(call: Call) -> Entry | None:
    """The entry that a user has registered for the op of `call`."""
    if not RULES or not isinstance(call.target, OpOverload):
        return None
    return RULES.get(str(call.target)) or RULES.get(str(call.target.overloadpacket))


def registered_rule(entry: Entry, call: Call) -> Rule | None:
    """What a registered entry says of `call`; it must fit the call's tensors."""
    rule = entry(call)
    if rule is None:
        return None
    if not isinstance(rule, Rule):
        refuse(call, f"the rule returned {type(rule).__name__}", "return a Rule, for instance by `labelled`, or None")
    for kind, labels, shapes in (("input", rule.inputs, call.inputs), ("output", rule.outputs, call.outputs)):
        if len(labels) != len(shapes):
            refuse(
                call,
                f"the rule has {len(labels)} {kind}s, the call {len(shapes)}: {', '.join(map(text, shapes))}",
                f"give the dims of each {kind}",
            )
        for j, (names, shape) in enumerate(zip(labels, shapes, strict=True)):
            if names is not None and shape is not None and len(names) != len(shape):
                refuse(
                    call,
                    f"the rule names {len(names)} dims of {kind} {j}, which is {text(shape)}",
                    "name each dim, or write `...` for any number of them",
                )
    return rule


def text(shape: Shape | None) -> str:
    return "None" if shape is None else f"[{', '.join(map(str, shape))}]"


def refuse(call: Call, what: str, remedy: str) -> NoReturn:
    raise PlacementError(Offence(f"{call.target}: {what}", where(call.node), remedy=remedy))


def resolve(op: Op) -> tuple[str, list[FunctionSchema]]:
    """The key of an op in RULES, and the schemas that a rule for it must fit."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload.overloadpacket
    if isinstance(op, str):
        op = look_up(op)
    if isinstance(op, OpOverload):
        return str(op), [op._schema]
    if isinstance(op, OpOverloadPacket):
        return str(op), [getattr(op, name)._schema for name in op.overloads()]
    raise PlacementError(
        Offence(
            f"register_rule got {op!r}",
            remedy='pass an op: torch.ops.mylib.scale_rows, what torch.library.custom_op gave, or "mylib::scale_rows"',
        )
    )


def look_up(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    found: Any = torch.ops
    try:
        for part in (namespace, *rest.split(".")):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        found = None
    if not isinstance(found, (OpOverload, OpOverloadPacket)):
        raise PlacementError(
            Offence(f"there is no op {name!r}", remedy='define it first, and name it "ns::name" or "ns::name.overload"')
        )
    return found


# ---------------------------------------------------------------------------------------------------- annotations

Names = tuple[str, ...] | None  # of the dims of one operand; None: `*`


@dataclass(frozen=True)
class Annotation:
    """A rule as a line: names of the dims of every tensor argument and every result, and how missing names are reduced."""

    op: str
    line: str
    inputs: tuple[Names, ...]
    outputs: tuple[Names, ...]
    reduce: dict[str, str]

    @classmethod
    def parse(cls, op: str, line: str, schemas: Sequence[FunctionSchema]) -> Annotation:
        body, _, reductions = line.partition("|")
        left, arrow, right = body.partition("->")
        self = cls(op, line, operands(left), operands(right), dict(pairs(reductions)))
        if not arrow:
            self.wrong("there is no `->`", GRAMMAR)
        self.check_names()
        functional = [schema for schema in schemas if not schema.is_mutable]
        if not functional:
            self.wrong(f"{op} writes to its arguments", "a rule is for an op that returns new tensors")
        for schema in functional:
            self.check_schema(schema)
        return self

    def wrong(self, what: str, remedy: str) -> NoReturn:
        raise PlacementError(Offence(f'register_rule({self.op}, "{self.line}"): {what}', remedy=remedy))

    def check_names(self) -> None:
        for kind, group in (("argument", self.inputs), ("result", self.outputs)):
            for j, names in enumerate(group):
                if names is None and kind == "result":
                    self.wrong(f"result {j} is `*`", "name its dims, or write `_` for those that can't be split")
                for name in names or ():
                    if not re.fullmatch(r"[A-Za-z]\w*|_|\.\.\.", name):
                        self.wrong(f"{kind} {j} has {name!r}", GRAMMAR)
                    if name != "_" and (names or ()).count(name) > 1:
                        self.wrong(
                            f"{kind} {j} has {name} twice",
                            "write `_`: two dims of one tensor can't be split as one",
                        )
        known = {name for names in self.inputs for name in names or ()} - {"_"}
        for j, names in enumerate(self.outputs):
            for name in names or ():
                if name not in known | {"_"}:
                    self.wrong(f"result {j} has {name}, which no argument has", f"write `_` in place of {name}")
            for name in sorted(known - set(names or ()) - self.reduce.keys()):
                self.wrong(
                    f"{name} stands in an argument but not in result {j}",
                    f"say how it's reduced: `| sum {name}`; or write `_` in place of {name}: it can't be split then",
                )
        for name, op in self.reduce.items():
            if op not in REDUCTIONS:
                self.wrong(f"{op!r} isn't a reduction", f"one of {', '.join(REDUCTIONS)}, then the names: `| sum n`")
            if name not in known or name == "...":
                self.wrong(f"{name} is reduced, but no argument has it", "only names of arguments' dims can be reduced")

    def check_schema(self, schema: FunctionSchema) -> None:
        name = ".".join(filter(None, (schema.name, schema.overload_name)))
        arguments, results = tensors(schema.arguments), tensors(schema.returns)
        for kind, names, group in (("argument", self.inputs, arguments), ("result", self.outputs, results)):
            if len(names) != len(group):
                listed = f" ({', '.join(group)})" if kind == "argument" and group else ""
                self.wrong(
                    f"{len(names)} {kind}{'s' * (len(names) != 1)}, but {name} has {len(group)} with tensors{listed}",
                    "describe each, separated by commas; arguments that aren't tensors aren't described",
                )

    def __call__(self, call: Call) -> Rule:
        assert call.schema is not None
        by_name = dict(zip(tensors(call.schema.arguments), self.inputs, strict=True))
        inputs = [by_name[name] for name in argument_of_tensors(call)]
        outputs = list(self.outputs) if len(self.outputs) == len(call.outputs) else [*self.outputs] * len(call.outputs)
        ins = [self.fit(call, "input", j, n, s) for j, (n, s) in enumerate(zip(inputs, call.inputs, strict=True))]
        outs = [self.fit(call, "output", j, n, s) for j, (n, s) in enumerate(zip(outputs, call.outputs, strict=True))]
        self.check_sizes(call, [*zip(ins, call.inputs, strict=True), *zip(outs, call.outputs, strict=True)])
        return labelled(ins, outs, reduce=self.reduce)

    def fit(self, call: Call, kind: str, j: int, names: Names, shape: Shape | None) -> list[Hashable] | None:
        """The labels of one tensor; `...` becomes as many as it takes."""
        if names is None or shape is None:
            return None
        spread = len(shape) - len(names) + 1 if "..." in names else 0
        if spread < 0 or ("..." not in names and len(names) != len(shape)):
            refuse(call, f'"{self.line}" names {len(names)} dims of {kind} {j}, which is {text(shape)}', GRAMMAR)
        labels: list[Hashable] = []
        for name in names:
            labels += [("...", k) for k in range(spread)] if name == "..." else [None if name == "_" else name]
        return labels

    def check_sizes(self, call: Call, operands: Sequence[tuple[list[Hashable] | None, Shape | None]]) -> None:
        sizes: dict[Hashable, int] = {}
        for labels, shape in operands:
            for label, size in zip(labels or (), shape or (), strict=False):
                if label is not None and sizes.setdefault(label, size) != size:
                    name = label if isinstance(label, str) else "a dim of `...`"
                    refuse(
                        call,
                        f'"{self.line}": {name} is {sizes[label]} in one tensor and {size} in another',
                        "write `_` for a dim that is stretched or resized, or register a function that looks at the shapes",
                    )


def operands(side: str) -> tuple[Names, ...]:
    found: list[Names] = []
    for part in side.split(","):
        words = tuple(part.split())
        found.append(None if words == ("*",) else () if words == ("()",) else words)
    return tuple(found)


def pairs(reductions: str) -> list[tuple[str, str]]:
    """ "sum n t, max f" -> n: sum, t: sum, f: max."""
    return [(name, words[0]) for part in reductions.split(",") if (words := part.split()) for name in words[1:] or [""]]


def tensors(arguments: Sequence[Any]) -> list[str]:
    """Names of the arguments, or returns, that hold tensors."""
    return [a.name for a in arguments if "Tensor" in str(a.type)]


def argument_of_tensors(call: Call) -> list[str]:
    """For each tensor of a call the argument that it's in."""
    assert call.schema is not None
    given = [(a.name, x) for a, x in zip(call.schema.arguments, call.node.args, strict=False)]
    return [
        name
        for name, x in (*given, *call.node.kwargs.items())
        for leaf in tree_leaves(x, is_leaf=lambda v: isinstance(v, fx.Node))
        if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), torch.Tensor)
    ]
