"""Capture: a plain train step becomes one functional graph, with a role for every input and output."""

from spmd.capture.arguments import flatten_leaves as flatten_leaves
from spmd.capture.guards import Changed as Changed
from spmd.capture.guards import Guards as Guards
from spmd.capture.result import Capture as Capture
from spmd.capture.result import Slot as Slot
from spmd.capture.whole_step import capture as capture
from spmd.capture.whole_step import guards_hold as guards_hold
