"""Every private torch name that spmd uses, in one file, with what it's for. Tried on torch 2.13."""

from __future__ import annotations

import torch

# Capture: fake tensors and symbolic sizes.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)  # .numpy(), .tolist() on traced values
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)  # nonzero and the like
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor  # a tensor without data
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # makes fakes, runs meta kernels
from torch._subclasses.functional_tensor import (
    FunctionalTensor as FunctionalTensor,
)  # what the user's code sees while traced
from torch._subclasses.functional_tensor import (
    FunctionalTensorMode as FunctionalTensorMode,
)  # one-pass functionalisation
from torch._subclasses.functional_tensor import (
    disable_functional_mode as disable_functional_mode,
)  # to make plain fakes inside it
from torch._dynamo.source import ConstantSource as ConstantSource  # names the symbols
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer as PythonKeyTracer,
)  # its create_node is where provenance is written
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing as disable_proxy_modes_tracing,
)  # to make fakes that aren't nodes
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode  # the tracer in use
from torch.fx.experimental.proxy_tensor import get_proxy_slot as get_proxy_slot  # tensor -> its node
from torch.fx.experimental.proxy_tensor import (
    make_fx as make_fx,
)  # functorch.make_fx lacks _allow_non_fake_inputs and record flags
from torch.fx.experimental.proxy_tensor import track_tensor_tree as track_tensor_tree  # tensor := node
from torch.fx.experimental.symbolic_shapes import DimDynamic as DimDynamic
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode as GuardOnDataDependentSymNode,
)  # `if` on a traced value
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv  # holds symbols, guards and replacements
from torch.fx.experimental.symbolic_shapes import (
    free_unbacked_symbols as free_unbacked_symbols,
)  # sizes that depend on values

# Capture: the context of tracing.
from torch._C import _current_autograd_node as current_autograd_node  # the backward function that runs now
from torch.autograd import _get_sequence_nr as next_sequence_number  # ties backward nodes to their forward
from torch._dispatch.python import (
    enable_python_dispatcher as enable_python_dispatcher,
)  # Python decompositions of composites
from torch._guards import TracingContext as TracingContext
from torch._guards import tracing as tracing
from torch._decomp import decomposition_table as decomposition_table  # torch's own decompositions, by op

# Sharing with the runtime.
from torch.utils._pytree import TreeSpec as TreeSpec

# Parameters and states are DTensors after the first compiled call.
from torch.distributed.tensor import DTensor as DTensor

# Runtime: DTensors over persistent buffers. `DTensor.from_local` costs 1 ms a call; the constructor with a ready spec 8 us.
from torch.distributed.tensor._dtensor_spec import (
    DTensorSpec as DTensorSpec,
)  # mesh, placements, global shape and stride
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta  # the latter two, and dtype

# A dim that two mesh axes split: the placement on the earlier one.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# Capture: which fake mode a tensor belongs to.
from torch._guards import detect_fake_mode as detect_fake_mode

# Capture: backward runs in the tracing thread.
from torch.autograd import set_multithreading_enabled as set_multithreading_enabled

# Capture: mkldnn off, without the warnings that the public context manager gives on some builds.
from torch._C import _get_mkldnn_enabled as get_mkldnn_enabled
from torch._C import _set_mkldnn_enabled as set_mkldnn_enabled

# Capture: our TorchFunctionMode is off while autograd runs, and on in the backward of custom functions.
from torch.autograd.function import BackwardCFunction as BackwardCFunction
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode_temporarily as without_top_function_mode

# Capture: the helper behind LSTM, GRU and RNN decompositions, whose dropout is broken in 2.13.
from torch._decomp import decompositions as torch_decompositions

# Capture: arithmetic on sizes becomes nodes only where a tensor op uses it (three of four nodes otherwise, dead at the end).
from torch.fx.experimental.proxy_tensor import maybe_enable_thunkify as lazy_size_nodes

# Guards: a condition on sizes and numbers, evaluated as Python would.
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis

# Capture: what torch.func's transforms hand to the function isn't the user's own tensor.
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor

# Capture: ops with effects are handed through instead of being chained by tokens.
from torch._higher_order_ops import effects as op_effects

# Runtime: programs run without the autograd keys.
from torch._C import _AutoDispatchBelowAutograd as below_autograd

# Graphs: ops, pytrees, and the functional collectives that local programs consist of.
from torch._ops import HigherOrderOperator as HigherOrderOperator  # cond, while_loop, scan
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule  # generates its code when first called
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# Sharding: rules for custom ops, and DTensor's own as candidates.
from torch._C import FunctionSchema as FunctionSchema  # arguments and returns of an op
from torch._C import _jit_resolve_packet as resolve_overload  # the overload that a call of an op takes
from torch._library.custom_ops import CustomOpDef as CustomOpDef  # what torch.library.custom_op returns
from torch.distributed.tensor._op_schema import (
    OpSchema as OpSchema,
)  # a call with DTensorSpecs in the place of its tensors
from torch.distributed.tensor._op_schema import OpStrategy as OpStrategy  # what a strategy function returns
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo as RuntimeSchemaInfo

# Counter-based random numbers: whether Inductor can fuse the ops of the mix into one kernel on this GPU.
from torch.utils._triton import has_triton as has_triton

# Guards: hooks that run for every module and every optimizer.
import torch.nn.modules.module as _module
import torch.optim.optimizer as _optimizer

GLOBAL_HOOKS = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
    _optimizer._global_optimizer_pre_hooks,
    _optimizer._global_optimizer_post_hooks,
)

c10d_functional = torch.ops._c10d_functional
sharding_propagator = DTensor._op_dispatcher.sharding_propagator  # holds the strategies, by op

# Capture: functions of symbolic numbers, by their name in `math`.
symbolic_functions = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("sqrt", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos", "atan", "log2")
}

# Capture: torch's checks of values, which become assertions in the graph.
is_all_true = torch._is_all_true  # what torch.distributions validates its arguments with
assert_async = torch._assert_async

# Capture: the method of nn.Module that every call goes through, beneath fx's own wrapper of __call__.
MODULE_CALL = "_call_impl"

# Capture: values behind functional tensors, written by hand.
# The first tells what a FunctionalTensor wraps: autograd hands that out where a Function saves its output.
is_functional_tensor = torch._is_functional_tensor
sync = torch._sync
from_functional_tensor = torch._from_functional_tensor
functionalize_replace = torch._functionalize_replace
functionalize_commit_update = torch._functionalize_commit_update
DisableTorchFunction = torch._C.DisableTorchFunction

# Capture: what code under trace is told about where it runs.
compile_session = torch.compiler._compile_session_context
non_strict_tracing = torch.compiler._non_strict_tracing_context


def say_compiling(flag: bool) -> None:
    """What `torch.compiler.is_compiling()` answers: torch's optimizers then compute on tensors only, without branches on their values."""
    torch.compiler._is_compiling_flag = flag
