"""A tool agent of several turns: the model chooses a tool, the program runs it, the result goes back, and again.

Four agents run at once. They share the instructions and the worked example, and each turn finds all of its agent's
earlier turns in the tree.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from common import run

from phloem.programs import Program, State

STOCK = {"apples": 120, "pears": 45, "plums": 300, "nuts": 18}
OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
INSTRUCTIONS = """\
An assistant of a fruit shop answers questions with the help of two tools, and then finishes.
- stock[item] tells how many of an item are in the shop: apples, pears, plums or nuts.
- calculate[expression] computes with numbers, as in calculate[12 * 3].
- finish[answer] gives the answer.

Question: How many pears are left when 5 are sold?
Action: stock[pears]
Result: 45
Action: calculate[45 - 5]
Result: 40
Action: finish[40]

Question: How many nuts are there when 7 more are brought?
Action: stock[nuts]
Result: 18
Action: calculate[18 + 7]
Result: 25
Action: finish[25]

"""
QUESTIONS = (
    "How many apples are left when 20 are sold?",
    "How many plums are left when 100 are sold?",
    "How many apples are there when 30 more are brought?",
    "How many pears are left when 40 are sold?",
)
MAX_TURNS = 5


def calculate(expression: str) -> str:
    """Plain arithmetic on numbers; whatever else is written there is refused."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (ValueError, SyntaxError, ZeroDivisionError):
        return "that cannot be computed"


def agent(state: State, question: str) -> str:
    """One agent's run, up to its answer."""
    state += f"{INSTRUCTIONS}Question: {question}\n"
    for _ in range(MAX_TURNS):
        state += "Action:"
        tool = state.select([" stock", " calculate", " finish"])
        state += "["
        if tool == " stock":
            argument = state.select(list(STOCK))
        else:
            argument = state.gen(max_tokens=24, stop=("]", "\n"), temperature=0.0)
        state += "]\n"
        if tool == " finish":
            return argument
        state += f"Result: {STOCK[argument] if tool == ' stock' else calculate(argument)}\n"
    return "no answer"


def traced(state: State, question: str) -> str:
    """The run as text."""
    agent(state, question)
    return state.text.rpartition("\n\n")[2].strip()


def solve(program: Program) -> str:
    # The first one alone, so that the others find the instructions computed.
    first, *others = QUESTIONS
    return "\n\n".join([*program.map(traced, [first]), *program.map(traced, others)])


if __name__ == "__main__":
    run(__doc__.partition("\n")[0], solve)
