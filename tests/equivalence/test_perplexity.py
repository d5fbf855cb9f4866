"""What int8 activations and an f16 cache cost the demo model, as perplexity on a fixed text beside float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phloem.config import KVCacheDtype
from phloem.models.load import LoadedModel, load_model
from phloem.runner.native_runner import NativeRunner
from phloem.runner.torch_runner import TorchRunner
from phloem.types import Float32Array, StepPlan
from tests.kernels.reference import step_plan

TEXT = """\
Trees move sugar from their leaves to their roots through a tissue called phloem. Water goes the other way, through
the xylem, pulled up by evaporation from the leaves. Both are bundles of narrow tubes, and both were described long
before anyone could measure what flows in them. A simple experiment shows the difference: if a ring of bark is cut
from a trunk, the leaves stay green for weeks, since water still rises, but the roots starve and in the end the tree
dies. Gardeners know a gentler use of the same effect. A shallow cut above a bud keeps sugar near it and makes a pear
tree bear fruit a year earlier.

In 1930 the German botanist Ernst Muench proposed that pressure alone drives the flow. Where sugar enters a tube,
water follows by osmosis and the pressure rises; where sugar leaves, the pressure falls. The idea was doubted for
decades, because the sieve plates between the cells seemed too narrow. Today microscopes with fluorescent dyes follow
single particles along the stem, and they move at about one metre an hour, which fits the theory well.

def flow(pressure_in: float, pressure_out: float, resistance: float) -> float:
    return (pressure_in - pressure_out) / resistance

What do we learn from it? First, that a system without a pump can still be fast. Second, that a good measurement is
worth more than a long argument. The old question is settled, but a new one is open: how do trees of a hundred metres
keep the pressure that such a distance needs?
"""


@pytest.fixture(scope="module")
def model(demo_model: Path) -> LoadedModel:
    return load_model(demo_model, max_len=512)


@pytest.fixture(scope="module")
def plan(model: LoadedModel) -> StepPlan:
    tokens = list(model.tokenizer.encode(TEXT))
    return step_plan([(tokens, 0, np.arange(len(tokens), dtype=np.int32))])


@pytest.fixture(scope="module")
def exact(model: LoadedModel, plan: StepPlan) -> float:
    return perplexity(TorchRunner(model.spec, model.weights, plan.num_rows).logits(plan), plan)


def perplexity(logits: Float32Array, plan: StepPlan) -> float:
    scores = logits[:-1].astype(np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    chosen = scores[np.arange(len(scores)), plan.token_ids[1:]]
    return float(np.exp((np.log(np.exp(scores).sum(axis=1)) - chosen).mean()))


@pytest.mark.parametrize(("kv_cache_dtype", "bound"), [("f32", 0.005), ("f16", 0.005), ("int8", 0.02)])
def test_perplexity_stays_near_float32(
    model: LoadedModel, plan: StepPlan, exact: float, kv_cache_dtype: KVCacheDtype, bound: float
) -> None:
    assert plan.num_rows > 300
    runner = NativeRunner(model.spec, model.weights, num_slots=plan.num_rows, kv_cache_dtype=kv_cache_dtype)
    ratio = perplexity(runner.logits(plan), plan) / exact
    print(f"{kv_cache_dtype}: perplexity {exact * ratio:.3f}, float32 {exact:.3f}, ratio {ratio:.5f}")
    assert abs(ratio - 1) < bound
