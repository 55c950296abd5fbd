"""What a rewrite leaves behind: masks that nobody reads, and what was computed for them only."""

from __future__ import annotations

from torch.fx import Graph

__all__ = ["drop_dead"]


def drop_dead(graph: Graph) -> Graph:
    """Drop everything that no result depends on; inputs stay, and so do checks of sizes."""
    graph.eliminate_dead_code()
    return graph
