"""Monte Carlo tree search over sentences: grow a story where playing it out to its end has gone well.

Each node of the search is a state. Its text is in the radix tree, so to come back to a node, to branch from it or to
play it out costs only the new tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common import run

from phloem.programs import Branches, Program, State

OPENING = (
    "Below is a short story for children. It is friendly and surprising, it has a clear problem, and in the end the "
    "animals solve the problem together.\n\nThe Owl and the Broken Bridge\n\n"
    "In a forest at the edge of the mountains lived an old owl who knew everything about the weather. One morning "
    "the river had taken the bridge away, and the hedgehogs could not get home."
)
NUM_SIMULATIONS, NUM_CHILDREN, MAX_DEPTH, EXPLORATION = 10, 3, 3, 0.7


@dataclass
class Node:
    """A beginning of the story and how well it went from there."""

    state: State
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    visits: int = 0
    value: float = 0.0

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1

    def urgency(self) -> float:
        """Upper confidence bound: what went well, or was hardly tried."""
        assert self.parent is not None
        if self.visits == 0:
            return math.inf
        return self.value / self.visits + EXPLORATION * math.sqrt(math.log(self.parent.visits) / self.visits)


def expand(node: Node) -> None:
    """Draw next sentences."""
    branches = node.state.fork(NUM_CHILDREN)
    branches.gen("sentence", max_tokens=28, stop=".", include_stop=True, temperature=0.9)
    node.children = [Node(branch, node) for branch in branches]


def play_out(node: Node) -> float:
    """Let the story run on, and ask whether it became a good one: a probability."""
    playout: Branches = node.state.fork(1)
    playout.gen(max_tokens=24, temperature=0.9)
    playout += "\n\nTo the children this story was"
    playout.select([" wonderful", " boring"], "verdict")
    good, bad = playout[0].details["verdict"]
    return 1.0 / (1.0 + math.exp(bad.total - good.total))


def solve(program: Program) -> str:
    root = Node(program.start(OPENING))
    for simulation in range(1, NUM_SIMULATIONS + 1):
        node = root
        while node.children:
            node = max(node.children, key=Node.urgency)
        if (node.visits or node is root) and node.depth < MAX_DEPTH:
            expand(node)
            node = node.children[0]
        value = play_out(node)
        print(f"simulation {simulation:2}: depth {node.depth}, value {value:.2f}")
        at: Node | None = node
        while at is not None:
            at.visits, at.value, at = at.visits + 1, at.value + value, at.parent
    best = root
    while any(child.visits for child in best.children):
        best = max(best.children, key=lambda child: child.visits)
    return "\n" + best.state.text.partition("\n\n")[2]


if __name__ == "__main__":
    run(__doc__.partition("\n")[0], solve)
