"""The contract of a pass, and the pipeline that runs passes in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from spmd.errors import Offence, PassError
from spmd.graph.local import LocalGraph
from spmd.graph.verify import verify_local


class GraphPass(Protocol):
    """One rewrite of a rank's program. Implementations are frozen dataclasses whose fields are their options."""

    name: ClassVar[str]

    def apply(self, graph: LocalGraph) -> LocalGraph: ...


@dataclass(frozen=True)
class PassPipeline:
    """Passes in the order in which they run. The graph is verified after each; a pass that breaks it is named."""

    passes: tuple[GraphPass, ...] = ()

    @classmethod
    def parse(cls, spec: str) -> PassPipeline:
        """The pipeline that a spec string names: "default" or "none".

        Raises:
            PassError: the name is unknown.
        """
        if spec not in ("default", "none"):
            raise PassError(
                Offence(
                    f"no pass pipeline is called {spec!r}",
                    remedy='use "default", "none" or a PassPipeline of your passes',
                )
            )
        return cls()

    def run(self, graph: LocalGraph) -> LocalGraph:
        """Apply every pass.

        Raises:
            PassError: a pass left a graph that breaks an invariant.
        """
        for p in self.passes:
            graph = p.apply(graph)
            try:
                verify_local(graph)
            except Exception as error:
                raise PassError(Offence(f"pass {p.name!r} broke the graph: {error}")) from error
        return graph
