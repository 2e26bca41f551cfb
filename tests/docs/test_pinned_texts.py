"""PTX that no emulator runs, word for word, with the reason for each instruction.

Most of these texts are for one process per GPU, and the emulator is one process. If you change a text here, say
why the new text is right, and run tests/multi_gpu/, also under mpirun.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.kernels.target import Target
from overlap.primitives.addresses import TABLE_FLAGS
from tests import oracle
from tests.ops.mesh_cases import layout

# The kernel that writes the addresses zeroes the flags behind the table, as XLA would. 128 threads do it, each at its
# own offset from the start ($0, flags of 4 bytes). Plain stores suffice: no other kernel uses this memory yet, and the
# kernel that reads it is launched later on the same stream.
ZEROES = r"""{
\.reg \.b32 thread;
\.reg \.b64 mine;
mov\.u32 thread, %tid\.x;
mad\.wide\.u32 mine, thread, 4, \$0;
(?:st\.global\.b32 \[mine\+\d+\], 0;
)+}"""
# A table entry of 8 bytes: an address, or the rank. All threads store the same value, so the order does not matter.
ENTRY = r"st\.global\.b64 \[\$0\+(\d+)\], \$1;"
# In the fused kernel, by one warp: the address that peers were told ($0) must be the address that this kernel received
# ($1). `ne`: any difference counts, in all 64 bits. The trap makes the program fail instead of corrupting a peer's
# memory.
REQUIRES = r"{ \.reg \.pred differ; setp\.ne\.b64 differ, \$0, \$1; @differ trap; }"
# The emulator runs a warp as one thread. Here the lanes of a real warp meet: behind a wait for a peer, since the lanes
# look at different times and what the first one does next may take the value away (`look_until`); and at the end of a
# warp's role, since the warps meet at an aligned barrier (`converge_warp`).
MEET = "bar.warp.sync 0xffffffff;"
AFTER_A_WAIT = rf"THERE:\s+fence\.acquire\.sys;\s+fence\.proxy\.async\.global;\s+{MEET}"


def texts_of(processes, gpu="NVIDIA H200", **keywords):
    """Lowers a program for four GPUs (in one process, or one process per GPU), and returns all its PTX texts."""
    found = []
    emit = mgpu_utils.inline_ptx

    def record(text, *operands, **options):
        found.append(text)
        return emit(text, *operands, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", gpu, 132))
        patch.setattr(
            core, "_is_known_multihost_mesh", lambda mesh: processes > 1 and mesh is not None and mesh.size > 1
        )
        patch.setattr(mgpu_utils, "inline_ptx", record)
        call = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", implementation="fused", **keywords)
        specs = (P("x", None), P(None, "x"))
        mapped = oracle.on_mesh(layout("x", x=4).mesh(), call, in_specs=specs, out_specs=P(None, "x"))
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 512), (512, 2048))]
        mapped.trace(*arguments).lower(lowering_platforms=("cuda",))
    return found


@pytest.fixture(scope="module")
def texts():
    return texts_of(4)


def test_the_table_of_addresses_is_zeroed_behind_stored_and_checked(texts):
    (text,) = (text for text in texts if re.fullmatch(ZEROES, text))
    zeroed = [int(offset) for offset in re.findall(r"mine\+(\d+)", text)]
    assert zeroed == list(range(4 * TABLE_FLAGS, 4096, 4 * 128)), "each word behind the table, and no other"
    places = [int(found[1]) for text in texts if (found := re.fullmatch(ENTRY, text))]
    # The rank, the addresses of the two buffers here, and their addresses on the four peers: each entry once.
    assert sorted(places) == [0, 8, 16, *range(32, 32 + 8 * 2 * 4, 8)]
    assert sum(bool(re.fullmatch(REQUIRES, text)) for text in texts) == 2
    # A device of another launch may look at the ready flag while it is lowered, and does not mind which value it sees.
    assert any("st.relaxed.sys.global.b32 [$0], 1;" in text for text in texts)


def test_the_lanes_of_a_warp_meet(texts):
    for found in (texts, texts_of(1, "NVIDIA B200")):
        waits = [text for text in found if "THERE:" in text]
        assert waits and all(re.search(AFTER_A_WAIT, text) for text in waits)
        assert found.count(MEET) == 1, "once for all roles of the transfer warpgroup"
