"""Logits to tokens: owns the order of the sampling rules, the random numbers and the logprobs.

Must not know the model, the cache or the scheduler: a row of logits and a LogitRow go in, a token comes out.
Each row is computed alone, so that its token does not depend on its batch mates.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem.errors import StepFailedError
from phloem.types import Float32Array, Int32Array, LogitRow, SamplingParams, TopLogprobs

LOGPROB_FLOOR = -9999.0
"""Reported for tokens of (nearly) no probability, since JSON has no infinity."""

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 64

Float64Array = NDArray[np.float64]
IntpArray = NDArray[np.intp]


class Sampled(NamedTuple):
    """Per LogitRow: the drawn token (or `target`), its logprob and the alternatives (None: not asked for)."""

    token_ids: Int32Array
    logprobs: Float32Array
    top: list[TopLogprobs | None]


def sample(logits: Float32Array, rows: list[LogitRow]) -> Sampled:
    """Draw one token per row of `logits` (float32 [L, V], left unchanged), or score the row's `target`.

    Rules in this order: repetition, presence and frequency penalty; logit bias; banned ids and grammar mask;
    temperature (0: greedy, ties to the lowest id); top-k, top-p, min-p, typical-p, each on what the one before
    it left; then the inverse CDF, walked in token-id order, at the uniform number of (seed, position).
    Logprobs are of the unchanged logits, and 0 for a draw whose params ask for none (they cost 20 times a greedy
    draw). Token ids in `rows` must lie inside the vocabulary.

    Cost: O(V) per row. Raises StepFailedError if a row has logits that are not finite, or if its grammar allows
    no token.
    """
    if len(rows) != len(logits):
        raise ValueError(f"sample needs one row of logits per LogitRow: got {len(logits)} rows, {len(rows)} LogitRows")
    token_ids = np.empty(len(rows), np.int32)
    logprobs = np.zeros(len(rows), np.float32)
    top: list[TopLogprobs | None] = []
    for i, row in enumerate(rows):
        raw = logits[i]
        best = int(raw.argmax())  # NaN counts as largest
        peak = float(raw[best])
        if not np.isfinite(peak):
            raise StepFailedError(f"logits of row {row.row} are not finite (largest: {peak}): damaged weights?")
        token = row.target if row.target >= 0 else _draw(raw, best, row)
        token_ids[i] = token
        count = row.params.prompt_logprobs if row.target >= 0 else row.params.logprobs
        if count is None and row.target < 0:
            top.append(None)
            continue
        normaliser = peak + float(np.log(np.exp(raw - peak).sum()))
        logprobs[i] = max(float(raw[token]) - normaliser, LOGPROB_FLOOR)
        top.append(None if count is None else _alternatives(raw, normaliser, count))
    return Sampled(token_ids, logprobs, top)


def uniform(seed: int, position: int) -> float:
    """The random number of a draw, in [0, 1): a function of its two arguments and nothing else.

    Counter-based: two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014), the upper 53 bits.
    """
    state = _mix((seed + _GOLDEN) & _MASK64)
    return (_mix((state + (position + 1) * _GOLDEN) & _MASK64) >> 11) * 2.0**-53


def largest(values: Float32Array | Float64Array, count: int) -> IntpArray:
    """Indices of the `count` largest values, largest first, ties by the lower index. No value may be NaN."""
    size = len(values)
    if count <= 0:
        return np.empty(0, np.intp)
    if count >= size:
        return np.argsort(-values, kind="stable")
    blocks = size // _BLOCK
    if blocks > 4 * count:
        # Cut the values into blocks (strided: the maximum runs along rows). The count-th largest block maximum
        # bounds the count-th largest value from below, at a fraction of the cost of a partition.
        maxima = values[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
        bound = np.partition(maxima, blocks - count)[blocks - count]
    else:
        bound = np.partition(values, size - count)[size - count]
    candidates = np.flatnonzero(values >= bound)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _alternatives(raw: Float32Array, normaliser: float, count: int) -> TopLogprobs:
    ids = largest(raw, count)
    return TopLogprobs(ids.astype(np.int32), np.maximum(raw[ids] - normaliser, LOGPROB_FLOOR).astype(np.float32))


def _draw(raw: Float32Array, best: int, row: LogitRow) -> int:
    params = row.params
    if not _adjusts(row):
        if params.temperature == 0.0:
            return best
        logits = raw.astype(np.float64)
    else:
        logits = _adjusted(raw, row)
        if params.temperature == 0.0:
            return int(logits.argmax())
    logits -= logits.max()
    with np.errstate(over="ignore"):
        logits /= params.temperature
    ids: IntpArray | None = None
    if 0 < params.top_k < len(logits):
        ids = np.sort(largest(logits, params.top_k))
        logits = logits[ids]
    # float32 keeps seven digits of each probability, which exp gives at a third of the price; sums are float64.
    # What lies below -200 is 0 in float32 anyway, and may not fit it.
    weights = np.exp(np.maximum(logits, -200.0).astype(np.float32)).astype(np.float64)
    if params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0:
        kept, weights = _truncate(weights, params)
        ids = kept if ids is None else ids[kept]
    place = _pick(weights, uniform(row.seed, row.position))
    return place if ids is None else int(ids[place])


def _pick(weights: Float64Array, share: float) -> int:
    """First index at which the running sum of `weights` passes `share` of the total: the inverse CDF.

    Sums blocks first, then walks the one block that holds the answer.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    cumulative = np.cumsum(np.add.reduceat(weights, starts))
    block = int(np.searchsorted(cumulative, share * cumulative[-1], side="right"))
    if block < len(starts):
        inside = weights[block * _BLOCK : (block + 1) * _BLOCK]
        before = float(cumulative[block - 1]) if block else 0.0
        place = int(np.searchsorted(before + np.cumsum(inside), share * cumulative[-1], side="right"))
        if place < len(inside) and inside[place] > 0.0:
            return block * _BLOCK + place
        return block * _BLOCK + int(np.flatnonzero(inside)[-1])
    return int(np.flatnonzero(weights)[-1])  # the product rounded up to the total


def _adjusts(row: LogitRow) -> bool:
    params = row.params
    return bool(
        params.logit_bias
        or row.banned
        or row.masker is not None
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _adjusted(raw: Float32Array, row: LogitRow) -> Float64Array:
    """Logits after penalties, bias and bans, as float64; forbidden tokens are -inf."""
    params = row.params
    logits = raw.astype(np.float64)
    if params.repetition_penalty != 1.0:
        seen = np.zeros(len(raw), np.bool_)
        seen[row.history] = True
        ids = np.flatnonzero(seen)
        values = logits[ids]
        logits[ids] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        ids, counts = np.unique(row.history[row.num_prompt :], return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    allowed = _allowed(len(raw), row)
    if allowed is not None:
        logits[~allowed] = -np.inf
    return logits


def _allowed(vocab_size: int, row: LogitRow) -> NDArray[np.bool_] | None:
    """Which tokens grammar and bans leave; where they leave nothing, the grammar outranks the bans."""
    if row.masker is None and not row.banned:
        return None
    allowed = np.ones(vocab_size, np.bool_)
    if row.masker is not None:
        bitmask = np.zeros((vocab_size + 31) // 32, np.uint32)
        row.masker.fill(bitmask)
        bits = np.unpackbits(bitmask.astype("<u4", copy=False).view(np.uint8), bitorder="little")
        allowed = bits[:vocab_size].astype(np.bool_)
        if not allowed.any():
            raise StepFailedError(f"the grammar of row {row.row} allows no token")
    if row.banned:
        rest = allowed.copy()
        rest[list(row.banned)] = False
        if rest.any():
            return rest
    return allowed


def _truncate(weights: Float64Array, params: SamplingParams) -> tuple[IntpArray, Float64Array]:
    """Indices (ascending) and weights that top-p, min-p and typical-p leave of unnormalised probabilities."""
    kept = np.arange(len(weights))
    if params.top_p < 1.0:
        kept = _smallest_mass(weights, weights, params.top_p)
    if params.min_p > 0.0:
        kept = kept[weights[kept] >= params.min_p * weights[kept].max()]
    if params.typical_p < 1.0:
        # Locally typical sampling (Meister et al. 2022): prefer information content near the entropy.
        kept = kept[weights[kept] > 0.0]
        share = weights[kept] / weights[kept].sum()
        information = -np.log(share)
        entropy = (share * information).sum()
        kept = kept[_smallest_mass(-np.abs(information - entropy), share, params.typical_p)]
    return kept, weights[kept]


def _smallest_mass(order: Float64Array, weights: Float64Array, share: float) -> IntpArray:
    """Smallest set, taken by `order` descending (ties by lower index), whose weights reach `share` of their sum.

    Sorts only as much of the head as it needs: 64 entries, then 8 times as many, and so on.
    """
    needed = share * weights.sum()
    count = 64
    while True:
        head = largest(order, count)
        cumulative = np.cumsum(weights[head])
        if cumulative[-1] >= needed or count >= len(weights):
            break
        count *= 8
    return np.sort(head[: int(np.searchsorted(cumulative, needed, side="left")) + 1])
