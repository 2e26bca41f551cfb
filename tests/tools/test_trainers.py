"""MaxText's training with the products of this library, and levanter's experts: the trainers themselves run.

tests/layers/test_trainers.py has what needs neither.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
from typing import Any

import numpy as np
import pytest

# Query, key, value and the logits; a dense layer's gate and up; the attention's output, and down.
DENSE = {"all_gather_lhs_matmul": 6, "matmul_reduce_scatter": 2}
EXPERTS = {"all_gather_lhs_matmul": 4, "matmul_reduce_scatter": 1}
GROUPED = {"all_gather_lhs_grouped_matmul": 1, "grouped_matmul": 2, "grouped_matmul_reduce_scatter": 1}
SHARED_GATHERS = {"all_gather_lhs_matmul": 3, "matmul_reduce_scatter": 2}
COUNTS: dict[str, dict[str, int]] = {"llama": DENSE, "mixtral": EXPERTS | GROUPED}
KERNELS: dict[str, dict[str, int]] = {
    "llama": {"all_gather_lhs_matmul fused": 17, "matmul_reduce_scatter fused": 6},
    "mixtral": {
        "all_gather_lhs_matmul fused": 11,
        "matmul_reduce_scatter fused": 3,
        "all_gather_lhs_grouped_matmul fused": 2,
        "grouped_matmul fused": 4,
        "grouped_matmul_reduce_scatter fused": 2,
    },
}


def check_twenty_steps(found: dict[str, Any], model: str, axis: str) -> None:
    """In float32, by what the library chooses on CPUs: the losses of MaxText alone, on a mesh of FSDP."""
    alone, ours = found[model]["alone"], found[model][axis]
    assert alone["counts"] == {} and len(ours["losses"]) == 20
    assert ours["counts"] == {f"{op} xla": count for op, count in COUNTS[model].items()}
    np.testing.assert_allclose(ours["losses"], alone["losses"], rtol=1e-5, equal_nan=False)
    assert alone["losses"][-1] < alone["losses"][0] - 0.02


def check_kernels(found: dict[str, Any], model: str) -> None:
    """In bfloat16, emulated, forward and backward. MaxText traces a block's body three times, and the logits twice."""
    alone, ours = found[model]["bfloat16, alone"], found[model]["bfloat16, fused"]
    np.testing.assert_allclose(ours["losses"], alone["losses"], rtol=1e-3, equal_nan=False)
    assert len(ours["losses"]) == 2 and all(ours["fused"]) and len(ours["fused"]) > sum(ours["counts"].values())
    assert ours["counts"] == KERNELS[model]


def check_other_models(found: dict[str, Any], model: str) -> None:
    """Three steps in float32: the balance loss, normalized gates, biases of experts, latent attention."""
    alone, ours = found[model]["alone"], found[model]["tensor_sequence"]
    np.testing.assert_allclose(ours["losses"], alone["losses"], rtol=1e-5, equal_nan=False)
    assert ours["counts"].keys() >= {f"{op} xla" for op in DENSE | GROUPED}


def check_weights_in_one_kernel(found: dict[str, Any]) -> None:
    """With fused_mlp and fused_qkv one gather serves gate and up, and one serves query, key and value."""
    of_model = found["fused weights"]
    np.testing.assert_allclose(of_model["tensor"]["losses"], of_model["alone"]["losses"], rtol=1e-5, equal_nan=False)
    assert of_model["tensor"]["counts"] == {f"{op} xla": count for op, count in SHARED_GATHERS.items()}


def check_experts_on_every_device(found: dict[str, Any]) -> None:
    """With FSDP alone there are no tensor-parallel products, and each device has all experts."""
    of_model = found["experts on every device"]
    np.testing.assert_allclose(of_model["fsdp"]["losses"], of_model["alone"]["losses"], rtol=1e-5, equal_nan=False)
    assert of_model["fsdp"]["counts"] == {f"{op} xla": count for op, count in GROUPED.items()}


def check_what_is_refused(found: dict[str, Any]) -> None:
    assert len(found["refused"]) == 12
    for name, message in found["refused"].items():
        assert re.match(rf"overlap\.trainers\.maxtext: .*\b{name} must be .*, got .*: ", message), (name, message)


def check_the_command_explains(found: dict[str, Any]) -> None:
    assert re.search(r"^3 +all_gather_lhs_matmul .* xla .*along 'tensor_sequence'", found["printed"], re.MULTILINE)


def check_experts_of_levanter(found: dict[str, Any]) -> None:
    """Its own `ring_gather_combine`, on 2 x 2 devices: the result and all gradients, in float32."""
    assert len(found["levanter"]) == 5 and max(found["levanter"]) < 1e-4


@pytest.mark.slow
@pytest.mark.one_jax
@pytest.mark.timeout(3600)
def test_trainers(repository: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Runs tests/tools/trainers_program.py in its own environment, once, and checks all that it found."""
    venv = repository / ".venv-trainers"
    subprocess.run([repository / "setup" / "trainers.sh", venv], check=True)
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(repository)}
    program = repository / "tests" / "tools" / "trainers_program.py"
    done = subprocess.run(
        [venv / "bin" / "python", program, tmp_path], env=os.environ | cpu, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = json.loads((tmp_path / "found.json").read_text())
    for model in COUNTS:
        for axis in ("tensor_sequence", "tensor"):
            check_twenty_steps(found, model, axis)
        check_kernels(found, model)
    for model in ("balance loss", "qwen3_moe", "gpt_oss", "deepseek"):
        check_other_models(found, model)
    check_weights_in_one_kernel(found)
    check_experts_on_every_device(found)
    check_what_is_refused(found)
    check_the_command_explains(found)
    check_experts_of_levanter(found)
