"""Tree of thoughts: at each step draw five candidates from each of the best plans so far, rate them, keep two.

All candidates of a plan share its whole text, and so do their ratings: the tree computes it once.
"""

from __future__ import annotations

from common import run

from phloem.programs import Program, State

TASK = (
    "Plan a day at the sea for a family with two small children, a dog and little money. They have no car, the "
    "weather may change in the afternoon, the grandmother cannot walk far, and everybody must be home before dinner. "
    "Write the plan as numbered steps of one short sentence each."
)
NUM_STEPS, NUM_CANDIDATES, NUM_KEPT = 3, 5, 2


def rating(plan: State) -> float:
    """How much the model prefers calling the plan good to calling it bad, as a difference of logprobs."""
    good, bad = plan.details["verdict"]
    return good.total - bad.total


def solve(program: Program) -> str:
    trunk = program.start()
    trunk.system("You are a careful planner.")
    trunk.user(TASK)
    with trunk.turn("assistant"):
        plans = trunk.fork(1)
        for step in range(1, NUM_STEPS + 1):
            candidates = plans.fork(NUM_CANDIDATES)
            candidates += f"{step}."
            candidates.gen(f"step {step}", max_tokens=24, stop="\n", temperature=0.9)
            candidates += "\n"
            judges = candidates.fork(1)
            judges += "(So far this plan is"
            judges.select([" good", " bad"], "verdict", by="total")
            ranked = sorted(range(len(judges)), key=lambda i: rating(judges[i]), reverse=True)
            print(f"step {step}: {len(candidates)} candidates, ratings", *(f"{rating(judges[i]):+.2f}" for i in ranked))
            plans = program.group([candidates[i] for i in ranked[:NUM_KEPT]])
        trunk.join(plans, best=plans[0])
    return "\n" + trunk.text.rpartition("assistant\n")[2]


if __name__ == "__main__":
    run(__doc__.partition("\n")[0], solve)
