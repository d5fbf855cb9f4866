"""What the examples share: a model or a server from the command line, and the counters that are printed at the end."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import io
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any

from phloem import Engine, EngineConfig
from phloem.engine.generation import Usage
from phloem.models.find_model import find_model
from phloem.programs import AsyncProgram, Program

Target = Engine | str


def run(description: str, solve: Callable[..., Any]) -> None:
    """Run `solve(program)`, plain or async, print what it returns and what it cost."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:30000 (default: load a model here)")
    parser.add_argument("--api-key", default="", help="the server's key")
    parser.add_argument("--model", default="", help="a .gguf file or a model folder (default: the demo model)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", action="store_true", help="run it again without sharing, and compare")
    args = parser.parse_args()
    with _open(args) as target:
        answer, usage, seconds = _timed(solve, target, args, share=True)
        print(answer)
        print(f"\nwith the tree:    {_cost(usage, seconds)}")
        print(f"prefilled {_ratio(usage.num_prompt_tokens, usage.num_computed_tokens)} less than without a cache")
        if args.compare:
            with redirect_stdout(io.StringIO()):
                again, alone, seconds_alone = _timed(solve, target, args, share=False)
            print(f"without sharing:  {_cost(alone, seconds_alone)}")
            same = "the same answer" if again == answer else "another answer"
            print(f"{same}, and {_ratio(seconds_alone, seconds)} the time")


def _open(args: argparse.Namespace) -> AbstractContextManager[Target]:
    if args.url:
        return nullcontext(args.url)
    return Engine.load(EngineConfig(model=str(find_model(args.model)), max_total_tokens=16384, max_model_len=4096))


def _timed(
    solve: Callable[..., Any], target: Target, args: argparse.Namespace, *, share: bool
) -> tuple[Any, Usage, float]:
    options: dict[str, Any] = {"seed": args.seed, "api_key": args.api_key, "share": share}
    began = time.perf_counter()
    if inspect.iscoroutinefunction(solve):
        program: Any = AsyncProgram(target if isinstance(target, str) else target.async_engine, **options)
        job = _closing(solve, program)
        answer = asyncio.run(job) if isinstance(target, str) else target.run(job)
    else:
        with Program(target, **options) as program:
            answer = solve(program)
    return answer, program.usage, time.perf_counter() - began


async def _closing(solve: Callable[..., Any], program: AsyncProgram) -> Any:
    async with program:
        return await solve(program)


def _cost(usage: Usage, seconds: float) -> str:
    return (
        f"{usage.num_prompt_tokens} prompt tokens, {usage.num_cached_tokens} of them reused, "
        f"{usage.num_computed_tokens} prefilled; {usage.num_output_tokens} tokens drawn; {seconds:.1f} s"
    )


def _ratio(more: float, less: float) -> str:
    return f"{more / max(less, 1e-9):.1f}x"
