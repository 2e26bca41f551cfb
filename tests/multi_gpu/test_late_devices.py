"""Results are right whichever device is late, and wrong without the flags and handshakes that make them so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.cli import soak_programs, soak_step
from overlap.collectives import communicator
from overlap.collectives.reduce import blocks_kernel
from overlap.primitives.handshake import Handshake
from tests import oracle
from tests.multi_gpu.late_devices import LATE, worst_error
from tests.ops.contract import BF16, F32, FORMS, JOINED, put
from tests.protocol.handshake_cases import do_not_look, speak_before_the_transfers, without_waiting_for

FEW = JOINED.replace(tile_n=256, stages=4, stream_k=8)
SHAPES = {"joined": (16, 512, 2048), "all, columns": (505, 1024, 512)}


def sized(name, *, extras=(), shape=None):
    m, n, k = shape or SHAPES.get(name, (512, 1024, 512))
    config = (
        oracle.fitting(FEW) if name == "joined" else oracle.fitting(FORMS[name].config) if name == "one shot" else None
    )
    return FORMS[name].but(m=m, n=n, k=k, config=config, extras=extras)


@pytest.mark.parametrize("name", FORMS)
def test_skewed_devices_and_inputs_overwritten_right_after(devices, name):
    assert worst_error(sized(name), devices, 30) < 1e-2


VICTIMS = [  # What is late, on which device, in which form.
    ("arrivals", 0, "pull"), ("arrivals", 1, "weights n"), ("arrivals", 1, "weights k"), ("arrivals", 0, "scatter m"),
    ("arrivals", 1, "all, rows"), ("departures", 1, "scatter n"), ("departures", 0, "one shot"),
    ("arrivals", 1, "scatter by ring"), ("announcing", 0, "ring"), ("passing on", 1, "ring"),
    ("beginning", 1, "pull"), ("one communicator", 1, "ring"), ("copying", 1, "joined"),
]  # fmt: skip


@pytest.mark.parametrize(("late", "victim", "name"), VICTIMS)
def test_a_device_that_is_late(devices, late, victim, name, monkeypatch):
    LATE[late](victim)(monkeypatch)
    assert worst_error(sized(name), devices, 5) < 1e-2


@pytest.mark.parametrize("name", ["pull", "joined"])
def test_scales_that_are_late(devices, name, monkeypatch):
    """CTAs stall before they copy scales, while other CTAs copy the rows."""
    LATE["scales"](1)(monkeypatch)
    assert worst_error(sized(name, extras=("lhs_scale",)), devices, 5) < 1e-2


def without_flags(patch):
    patch.setattr(communicator, "semaphore_wait", lambda *_, **__: None)


def without_flags_of_the_ring(patch):
    patch.setattr(Handshake, "wait_for", lambda *_: None)


def without_looking(patch):
    do_not_look(patch)
    # If a device does not look for a peer, it may miss a signal of that peer, and wait for the signal forever.
    without_waiting_for("seen", "done")(patch)


def without_waiting_for_blocks(patch):
    patch.setattr(communicator, "wait_for_block", lambda *_: None)


def without_waiting_for_terms(patch):
    patch.setattr(blocks_kernel._Body, "_await_terms", lambda *_: None)


LONG = (128, 1024, 4096)  # A late device still has to pull most of its chunks when the others leave.
CONTROLS = [  # The form, its shape, what is late, the defect, and the smallest error.
    ("pull", (256, 512, 512), ("arrivals",), without_flags, 1e-1),
    ("pull", (256, 512, 512), (), without_looking, 1e-1),
    ("pull", (2048, 256, 4096), ("arrivals",), speak_before_the_transfers, 1e-2),
    ("ring", (256, 512, 512), ("passing on",), without_flags_of_the_ring, 1e-1),
    ("weights n", LONG, ("arrivals",), without_flags, 1e-2),
    ("weights k", (128, 4096, 1024), ("arrivals",), speak_before_the_transfers, 1e-2),
    ("joined", (16, 512, 2048), ("copying",), without_flags, 1e-1),
    ("scatter m", (1024, 4096, 1024), ("arrivals", "departures"), without_waiting_for_blocks, 1e-2),
    ("scatter n", (2048, 1024, 1024), ("arrivals", "departures"), without_waiting_for_terms, 1e-2),
]


@pytest.mark.parametrize(("name", "shape", "late", "defect", "least"), CONTROLS)
def test_negative_control(devices, name, shape, late, defect, least, monkeypatch):
    for which in late:
        LATE[which](1)(monkeypatch)
    defect(monkeypatch)
    assert worst_error(sized(name, shape=shape), devices, 5 if late else 20, seed=4) > least


@pytest.mark.gpus(4)
@pytest.mark.parametrize(("axes", "victim"), [({"data": 2, "x": 2}, None), ({"x": 2, "data": 2}, 1)], ids=str)
def test_layers_in_a_loop_with_a_gather_before_and_a_sum_beside(axes, victim, monkeypatch):
    """Both halves of an MLP, repeatedly in one program, with XLA's sums along the other axis at the same time."""
    if jax.process_count() > 1 and jax.device_count() != 4:
        pytest.skip("one process per GPU: this test is for a job of 4")
    if victim is not None:
        LATE["arrivals"](victim)(monkeypatch)
    mesh, up, down = oracle.make_mesh(**axes), FORMS["pull"].but(config=None), FORMS["scatter m"].but(config=None)
    given = {**up.but(m=512, n=1536, k=1024).normal(2), "down": down.but(k=1536, n=1024).normal(2)["rhs"]}
    specs = {"lhs": P("x"), "rhs": P(None, "x"), "down": P("x")}

    def mlp(x, given, first, second):
        return second({"lhs": jax.nn.silu(first({"lhs": x, "rhs": given["rhs"]})).astype(BF16), "rhs": given["down"]})

    def body(given):
        def step(i, carry):
            x, beside, worst = carry
            exact = mlp(x, given, up.unfused, down.unfused).astype(F32)
            y = mlp(x, given, up, down)
            beside = beside + lax.psum(jnp.roll(x.astype(F32), i), "data")[:8, :8]
            worst = jnp.maximum(worst, oracle.distance(y, exact))
            # Rescaled to about the same size, and different on the devices along the other axis.
            y = y.astype(F32) * lax.rsqrt((y.astype(F32) ** 2).mean())
            return jnp.roll(y, 1 + lax.axis_index("data"), axis=1).astype(BF16), beside, worst

        _, beside, worst = lax.fori_loop(0, 20, step, (given["lhs"], jnp.zeros((8, 8), F32), jnp.float32(0)))
        return oracle.worst(jnp.where(jnp.isfinite(beside).all(), worst, jnp.inf), mesh)

    program = oracle.on_mesh(mesh, body, in_specs=(specs,), out_specs=P())
    assert float(program(put(given, specs, mesh))) < 2e-2


# --- A step on global arrays ------------------------------------------------------------------------------------------


def wrong_results_of_step(devices, steps, late_us=()):
    """Runs steps with products by kernels (along "x") and by XLA, in one program. Counts results with a wrong bit."""
    mesh = oracle.make_mesh(**({"data": 2, "x": devices // 2} if devices % 4 == 0 else {"x": devices}))
    late = np.resize(np.array(late_us or (0.0,), np.float32), mesh.size)
    given = (
        soak_programs.on_all(mesh, P(mesh.axis_names), late),
        soak_programs.on_all(mesh, P(), np.array(5, np.int32)),
        *soak_programs.operands(mesh, 7),
    )
    # Traced anew, since a test may have changed the kernels.
    return int(soak_step.program.__wrapped__(soak_step.STEP, mesh, "x", steps)(*given))


@pytest.mark.parametrize("late_us", [(0, 2000), (1000, 0, 0, 5000), (20000, 0, 100)], ids=str)
def test_a_step_on_devices_that_begin_late(devices, late_us):
    """Exact values, and all gradients, with XLA's gathers of weights and sums of cotangents beside the kernels."""
    assert wrong_results_of_step(devices, 40, late_us) == 0


@pytest.mark.parametrize(("late", "victim"), [("arrivals", 0), ("arrivals", 1), ("departures", 0), ("departures", 1)])
def test_a_step_with_a_device_that_is_late_inside_kernels(devices, late, victim, monkeypatch):
    LATE[late](victim)(monkeypatch)
    assert wrong_results_of_step(devices, 5) == 0


def test_negative_control_of_a_step(devices, monkeypatch):
    LATE["arrivals"](1)(monkeypatch)
    without_flags(monkeypatch)
    assert wrong_results_of_step(devices, 5) > 0
