"""The verifier between passes: for each rule a pass that breaks it, and the error that names pass and node."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn, optim
from torch.nn import functional as F

from spmd._torch import c10d_functional as c10d
from spmd.errors import PassError, VerifyError
from spmd.graph.edit import call, places, reorder
from spmd.graph.local import LocalGraph
from spmd.graph.verify import verify_ranks
from spmd.passes import PassPipeline
from tests import programs

aten = torch.ops.aten


def train(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def graph() -> LocalGraph:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = optim.AdamW(model.parameters(), 0.1, fused=True)
    return programs.programs(train, (model, optimizer, torch.rand(2, 4), torch.rand(2, 2)), "fully_shard", 2)[0]


def nodes(g: fx.Graph, target: object) -> list[fx.Node]:
    return g.find_nodes(op="call_function", target=target, sort=True)


def store_of_the_first_weight(g: fx.Graph) -> fx.Node:
    return next(n for n in nodes(g, aten.copy_.default) if n.args[0].name == "_0_weight")


def uses_before_computed(g: fx.Graph) -> None:
    (tanh,) = nodes(g, aten.tanh.default)
    g.output_node().prepend(tanh)


def waits_twice(g: fx.Graph) -> None:
    start = nodes(g, c10d.all_gather_into_tensor.default)[0]
    reader = next(iter(next(iter(start.users)).users))
    with g.inserting_before(reader):
        reader.replace_input_with(next(iter(start.users)), call(g, c10d.wait_tensor.default, start))


def never_waits(g: fx.Graph) -> None:
    wait = nodes(g, c10d.wait_tensor.default)[0]
    wait.replace_all_uses_with(wait.args[0])
    g.erase_node(wait)


def reads_before_the_wait(g: fx.Graph) -> None:
    wait = nodes(g, c10d.wait_tensor.default)[0]
    next(iter(wait.users)).replace_input_with(wait, wait.args[0])


def waits_for_no_collective(g: fx.Graph) -> None:
    (tanh,) = nodes(g, aten.tanh.default)
    with g.inserting_after(tanh):
        wait = call(g, c10d.wait_tensor.default, tanh)
    tanh.replace_all_uses_with(wait, delete_user_cb=lambda u: u is not wait)


def moves_without_a_note(g: fx.Graph) -> None:
    del nodes(g, c10d.reduce_scatter_tensor.default)[0].meta["collective"]


def lies_about_a_shape(g: fx.Graph) -> None:
    (tanh,) = nodes(g, aten.tanh.default)
    tanh.meta["val"] = tanh.meta["val"].new_empty(3, 4)


def lies_about_strides(g: fx.Graph) -> None:
    (tanh,) = nodes(g, aten.tanh.default)
    tanh.meta["val"] = tanh.meta["val"].new_empty_strided((2, 4), (1, 2))


def lies_about_a_type(g: fx.Graph) -> None:
    (tanh,) = nodes(g, aten.tanh.default)
    tanh.target = aten.isnan.default


def loses_an_update(g: fx.Graph) -> None:
    g.erase_node(nodes(g, aten.copy_.default)[0])


def updates_twice(g: fx.Graph) -> None:
    copy = nodes(g, aten.copy_.default)[0]
    with g.inserting_after(copy):
        call(g, aten.copy_.default, *copy.args)


def writes_to_an_input(g: fx.Graph) -> None:
    x = next(n for n in g.nodes if n.name == "x")
    with g.inserting_before(g.output_node()):
        call(g, aten.mul_.Tensor, x, 2)


def stores_before_the_last_reader(g: fx.Graph) -> None:
    """The gather of the first weight moves behind its update."""
    copy = store_of_the_first_weight(g)
    gather = next(n for n in nodes(g, c10d.all_gather_into_tensor.default) if n.args[0] is copy.args[0])
    wait = next(iter(gather.users))
    with g.inserting_before(g.output_node()):
        late = g.node_copy(wait, lambda n: g.node_copy(gather, lambda x: x))
    loss = g.output_node().all_input_nodes[-1]
    with g.inserting_before(g.output_node()):
        together = call(g, aten.add.Tensor, loss, call(g, aten.mul.Tensor, call(g, aten.sum.default, late), 0))
    g.output_node().replace_input_with(loss, together)


def starts_before_a_store_and_waits_after_it(g: fx.Graph) -> None:
    """The buffer is still being sent when it's overwritten."""
    copy = store_of_the_first_weight(g)
    gather = next(n for n in nodes(g, c10d.all_gather_into_tensor.default) if n.args[0] is copy.args[0])
    with g.inserting_before(copy):
        start = g.node_copy(gather)
    with g.inserting_before(g.output_node()):
        late = call(g, c10d.wait_tensor.default, start)
        loss = g.output_node().all_input_nodes[-1]
        together = call(g, aten.add.Tensor, loss, call(g, aten.mul.Tensor, call(g, aten.sum.default, late), 0))
    g.output_node().replace_input_with(loss, together)


def overwrites_what_is_read_later(g: fx.Graph) -> None:
    """The activation is needed for the backward."""
    (tanh,) = nodes(g, aten.tanh.default)
    with g.inserting_after(tanh):
        doubled = call(g, aten.mul_.Tensor, tanh, 2)
    first = next(u for u in tanh.users if u is not doubled)
    first.replace_input_with(tanh, doubled)


def returns_what_is_overwritten(g: fx.Graph) -> None:
    loss = g.output_node().all_input_nodes[-1]
    home = nodes(g, aten.copy_.default)[0].args[0]
    with g.inserting_before(g.output_node()):
        g.output_node().replace_input_with(loss, call(g, aten.view.default, home, [-1]))


def runs_before_the_ranks_agree(g: fx.Graph) -> None:
    settle = next(n for n in g.nodes if n.name == "settle_1")
    g.output_node().prepend(settle)


BROKEN: list[tuple[Callable[[fx.Graph], None], str]] = [
    (uses_before_computed, "uses tanh_default before it's computed"),
    (waits_twice, "all_gather_into_tensor_default must be waited for exactly once"),
    (never_waits, "all_gather_into_tensor_default must be waited for exactly once"),
    (reads_before_the_wait, "all_gather_into_tensor_default must be waited for exactly once"),
    (waits_for_no_collective, "waits for tanh_default, which is no collective"),
    (moves_without_a_note, "reduce_scatter_tensor_default = .* has no note"),
    (lies_about_a_shape, "tanh_default = .* yields f32.2,4. .* says f32.3,4."),
    (lies_about_strides, "tanh_default = .* yields .* strides .4, 1., its metadata says .* strides .1, 2."),
    (lies_about_a_type, "tanh_default = .* yields b8.2,4."),
    (loses_an_update, "is stored 0 times, not 1"),
    (updates_twice, "is stored 2 times, not 1"),
    (writes_to_an_input, "x .x. is stored 1 times, not 0"),
    (
        stores_before_the_last_reader,
        "all_gather_into_tensor_default_\\d+ reads \\w+ after copy__default\\w* has written",
    ),
    (starts_before_a_store_and_waits_after_it, "wait_tensor\\w+ reads \\w+ after copy__default\\w* has written"),
    (overwrites_what_is_read_later, "reads tanh_default after mul__tensor has written to tanh_default"),
    (returns_what_is_overwritten, "output reads \\w+ after copy__default\\w* has written"),
    (runs_before_the_ranks_agree, "runs before the ranks settle"),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN, ids=[f.__name__ for f, _ in BROKEN])
def test_a_pass_that_breaks_a_rule_is_named_with_the_node(broken: Callable[[fx.Graph], None], words: str) -> None:
    def rewrite(module: fx.GraphModule) -> None:
        broken(module.graph)

    rewrite.__name__ = broken.__name__
    with pytest.raises(PassError, match=f"pass '{broken.__name__}' broke the graph: .*{words}"):
        PassPipeline.of([rewrite]).run(graph())


def test_the_partitioner_breaks_none() -> None:
    assert len(PassPipeline.of([lambda module: module]).run(graph()).history) == 2


def test_ranks_must_run_the_same_collectives_in_the_same_order() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    args = (model, optim.SGD(model.parameters(), 0.1), torch.rand(2, 4), torch.rand(2, 2))
    first, second = programs.programs(train, args, "fully_shard", 2)
    verify_ranks([first, second])
    gathers = nodes(second.graph, c10d.all_gather_into_tensor.default)
    place = places(second.graph)
    place[gathers[1]] = place[gathers[0]] - 0.5
    reorder(second.graph, place)
    with pytest.raises(VerifyError, match=r"rank 0 runs all_gather_into_tensor_default = .*; rank 1 runs"):
        verify_ranks([first, second])


def test_a_reorder_keeps_what_must_come_first() -> None:
    """Whatever is wished for: reversed, the program still computes the same."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2), nn.Dropout(0.5))
    args = (model, optim.AdamW(model.parameters(), 0.1, foreach=False), torch.rand(2, 4), torch.rand(2, 2))
    graphs = programs.programs(train, args, "fully_shard", 2)
    torch.manual_seed(0)
    expected = programs.results(graphs)
    for g in graphs:
        reorder(g.graph, {n: -at for n, at in places(g.graph).items()})
        replace(g).graph.lint()
    torch.manual_seed(0)
    assert all(
        torch.equal(a, b) for a, b in zip(expected, programs.results(graphs), strict=True) if isinstance(a, Tensor)
    )
