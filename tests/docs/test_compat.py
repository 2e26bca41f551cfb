"""How `overlap/_compat/` changes jax: once, when a kernel is lowered for a GPU, and only in checked versions."""

from __future__ import annotations

import functools
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import overlap
from overlap import _compat, _requirements, _settings, primitives
from overlap._compat import patch
from overlap.choice import dispatch
from overlap.emulation import emulate
from overlap.kernels.config import Config
from overlap.kernels.hopper.mainloop import Hopper
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import Target
from overlap.primitives import HANDSHAKE_FLAGS, Handshake, PeerGroup, shared_semaphores
from overlap.primitives.host_mesh import ON_HOST_MESHES
from tests import oracle

TOO_NEW = ".".join(map(str, _requirements.JAX_BELOW)) + ".0"


@pytest.fixture
def nothing_applied(monkeypatch):
    monkeypatch.setattr(patch, "_applied", set())
    monkeypatch.delenv(_settings.UNCHECKED_JAX_VARIABLE, raising=False)
    _settings.unchecked_jax.cache_clear()
    yield
    _settings.unchecked_jax.cache_clear()


@pytest.fixture
def too_new(nothing_applied, monkeypatch):
    monkeypatch.setattr(jax, "__version__", TOO_NEW)


def lowered(function, *shapes):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    mapped = oracle.on_mesh(mesh, function, in_specs=(P("x"), P(None, "x")), out_specs=P(None, "x"))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return functools.partial(mapped.trace(*arguments).lower, lowering_platforms=("cuda",))


def gather(implementation):
    return lambda a, b: overlap.all_gather_lhs_matmul(a, b, "x", implementation=implementation)


SHAPES = (4096, 512), (512, 2048)


def a_mend(name="something"):
    made = []
    return made, patch.Patch(name, lambda: made.append(name))


def test_a_change_is_made_once_and_what_it_needs_before(nothing_applied, monkeypatch):
    made, second = a_mend("more")
    order = []
    inner = patch.Patch("inner", lambda: order.append("inner"))
    outer = patch.Patch("outer", lambda: order.append("outer"), needs=(inner,))
    _compat.apply(outer, inner)
    _compat.apply(outer, second, second)
    assert order == ["inner", "outer"] and made == ["more"]
    # Another copy of the library changes nothing again.
    module = types.ModuleType("module")
    module.function = lambda: 1
    monkeypatch.setitem(sys.modules, "module", module)
    for _ in range(2):
        patch.replace("module", "function", "doubles", lambda given: lambda: 2 * given())
    assert module.function() == 2


def test_a_version_that_was_not_checked_is_refused_unless_the_user_tries_it(too_new, monkeypatch):
    made, something = a_mend("kernels do things")
    with pytest.raises(RuntimeError) as refused:
        _compat.apply(something)
    way_out = 'implementation="xla"', f"{_settings.UNCHECKED_JAX_VARIABLE}=1"
    for word in ("kernels do things", f"jax {TOO_NEW} is", patch.CHECKED, *way_out):
        assert word in str(refused.value)
    assert not made
    monkeypatch.setenv(_settings.UNCHECKED_JAX_VARIABLE, "1")
    _settings.unchecked_jax.cache_clear()
    _compat.apply(something)
    assert made


def test_there_a_fused_kernel_is_refused_and_all_else_works(too_new, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    with pytest.raises(RuntimeError, match=rf"jax {TOO_NEW} is installed.*\"xla\""):
        lowered(gather("fused"), *SHAPES)()
    assert "dot" in lowered(gather("xla"), *SHAPES)().as_text()
    # A kernel whose operands are both contiguous along k needs no change.
    call = functools.partial(overlap.matmul, transpose_rhs=True, implementation="fused")
    traced = jax.jit(call).trace(*[jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 2)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    monkeypatch.undo()  # Emulated, kernels run on the newest jax.
    monkeypatch.setattr(jax, "__version__", TOO_NEW)
    with emulate():
        x = jnp.ones((64, 64), jnp.bfloat16)
        out = jax.jit(lambda x: overlap.matmul(x, x, implementation="fused", config=Config(tile_n=64, stages=2)))(x)
    assert (out == 64).all()


def test_tracing_a_kernel_changes_nothing_even_with_peers_and_lowering_does(nothing_applied, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    lower = lowered(gather("fused"), *SHAPES)
    assert not patch._applied
    lower()
    assert {ON_HOST_MESHES, _compat.WARP_LOOPS} < patch._applied


def test_a_mainloop_asks_for_what_it_needs():
    nt, along_k = {"transpose_rhs": True}, {"cluster": 2, "cluster_along": "k"}
    for layouts, config, forwards, expected in (
        ({}, {}, False, {"SQUARE_TILES"}),
        (nt, {}, False, set()),
        ({}, {"swap_operands": True}, False, {"SQUARE_TILES", "UNEQUAL_TILES"}),
        (nt, along_k | {"cluster": 4}, False, {"CLUSTER_REFS"}),
        ({}, along_k | {"swap_operands": True}, False, {"SQUARE_TILES", "UNEQUAL_TILES", "CLUSTER_REFS"}),
        (nt, along_k | {"cluster": 1}, False, set()),
    ):
        kinds = types.SimpleNamespace(layouts=OperandLayouts(**layouts), forwards=forwards)
        assert set(Hopper().patches(Config(**config), kinds)) == {getattr(_compat, name) for name in expected}


def cluster_refs_of_jax():
    return patch.private("jax.experimental.mosaic.gpu.utils", "get_cluster_ref")


def test_a_part_of_a_buffer_of_another_cta_is_read(nothing_applied, monkeypatch):
    """jax 0.12 can do it. jax 0.11 can do it with the patch only, which changes nothing in jax 0.12."""

    def reads_of_another_cta(part):
        def body(out_gmem, buffer_smem):
            of_other_cta = plgpu.cluster_ref(part(buffer_smem), {"rank": jnp.int32(1)})
            out_gmem[...] = plgpu.load(of_other_cta, layout=plgpu.Layout.WG_STRIDED((128,), 1))

        kernel = plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), cluster=(2,), cluster_names=("rank",),
            scratch_types=[plgpu.SMEM((2, 128), jnp.float32)],
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )  # fmt: skip
        return jax.jit(kernel).trace().lower(lowering_platforms=("cuda",)).as_text()

    given, has_offsets = cluster_refs_of_jax(), jax.__version_info__ >= (0, 12)
    own = getattr(given, "__wrapped__", given)
    parts = (lambda buffer: buffer.at[1], lambda buffer: buffer.at[lax.axis_index("rank")])
    monkeypatch.setattr("jax.experimental.mosaic.gpu.utils.get_cluster_ref", own)
    for part in () if has_offsets else parts:
        with pytest.raises(ValueError, match=r"Expected type memref<128xf32, strided<\[1\], offset: \?>"):
            reads_of_another_cta(part)
    _compat.apply(_compat.CLUSTER_REFS)
    assert (cluster_refs_of_jax() is own) == has_offsets
    for part in parts:
        assert "mosaic_gpu" in reads_of_another_cta(part)


def test_a_name_that_jax_has_not_got_is_said():
    utils = "jax.experimental.mosaic.gpu.utils"
    for module, path in (("jax._src.no_such", "thing"), ("jax._src.config", "no_such"), (utils, "c.no_such")):
        with pytest.raises(RuntimeError, match=rf"{module}\.{path}.*jax {jax.__version__} has not got it: install"):
            patch.private(module, path)


def test_a_kernel_of_a_user_is_prepared_for_explicitly(nothing_applied, monkeypatch):
    """Without explicit preparation, the kernel is refused instead of being lowered for unknown devices."""
    name = "mpmd_map_mgpu_lowering_rule"
    registration = "jax._src.pallas.mosaic_gpu.pallas_call_registration"
    rule = patch.private(registration, name)
    monkeypatch.setattr(f"{registration}.{name}", getattr(rule, "__wrapped__", rule))

    def body(x_gmem, out_gmem):
        (flags,) = shared_semaphores(HANDSHAKE_FLAGS)
        handshake = Handshake(flags, PeerGroup("x", (("x", 4),)), lax.axis_index("cta"), "user", transfers=3)

        @plgpu.warp_map
        def _one(warp):
            pl.when(warp == 0)(lambda: handshake.leave(handshake.begin() * 0))

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((128,), jnp.int32), grid=(2,), grid_names=("cta",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, skip_device_barrier=True
        ),
    )  # fmt: skip
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    traced = oracle.on_mesh(mesh, kernel, in_specs=P("x"), out_specs=P("x")).trace(
        jax.ShapeDtypeStruct((512,), jnp.int32)
    )
    with pytest.raises(RuntimeError, match=r"overlap\.primitives\.prepare\(\)"):
        traced.lower(lowering_platforms=("cuda",))
    primitives.prepare()
    assert 'xla_replica_ids = "0,1,2,3"' in traced.lower(lowering_platforms=("cuda",)).as_text()
