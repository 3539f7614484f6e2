"""Layouts, op rules and what places a step by them. Public: rules for ops of one's own."""

from spmd.sharding.check import check_rule
from spmd.sharding.register import register_rule
from spmd.sharding.rule import Call, Rule, labelled

__all__ = ["Call", "Rule", "check_rule", "labelled", "register_rule"]
