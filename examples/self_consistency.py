"""Self-consistency: draw ten chains of reasoning for one question and take the answer that most of them reach.

The question and the worked examples before it are computed once for all chains. Written with async.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter

from common import run

from phloem.programs import AsyncProgram

EXAMPLES = """\
Question: There are 3 cars in the yard and 2 more arrive. How many cars are in the yard?
Reasoning: There are 3 cars. 2 more arrive. 3 + 2 = 5.
Answer: 5

Question: Lea had 32 sweets and her sister had 42. They ate 35. How many sweets are left?
Reasoning: Together they had 32 + 42 = 74 sweets. They ate 35. 74 - 35 = 39.
Answer: 39

Question: There were 9 computers in the room. On each of 4 days 5 more were brought. How many are there now?
Reasoning: In 4 days 4 * 5 = 20 computers were brought. 9 + 20 = 29.
Answer: 29

Question: Anna had 8 pounds and bought 2 pens for 1 pound each. How many pounds has she left?
Reasoning: 2 pens cost 2 * 1 = 2 pounds. 8 - 2 = 6.
Answer: 6

"""
QUESTION = "There are 7 birds in the tree and 5 more come. Then 2 of them fly away. How many birds are in the tree?"
NUM_CHAINS = 10


async def solve(program: AsyncProgram) -> str:
    trunk = program.start(f"{EXAMPLES}Question: {QUESTION}\nReasoning:")
    chains = await trunk.fork(NUM_CHAINS)
    await asyncio.gather(
        *(chain.gen("reasoning", max_tokens=56, stop="\nQuestion:", temperature=0.4) for chain in chains)
    )
    votes: Counter[str] = Counter()
    for chain in chains:
        print("-", chain["reasoning"].strip().replace("\n", " / "))
        found = re.search(r"Answer:\s*(-?\d+)", chain["reasoning"])
        if found:
            votes[found[1]] += 1
    if not votes:
        return "no chain came to an answer"
    (answer, count), *_ = votes.most_common()
    return f"\n{QUESTION}\n{answer}, say {count} of {sum(votes.values())} chains that came to an answer: {dict(votes)}"


if __name__ == "__main__":
    run(__doc__.partition("\n")[0], solve)
