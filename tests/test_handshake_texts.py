"""The PTX of the handshakes and of the proxy fence, changed in one place: the emulator reports it, or it is harmless.

Each change is made to the text on its way into the kernel, so what is tested is what runs.
"""

import re

import pytest
from jax.experimental.mosaic.gpu import utils as mgpu_utils

from overlap.emulation import EmulationError, emulate
from tests.test_handshakes import joined_rows, tiles_of_their_own

# (what is found in a text, what takes its place); `[^}]*` reaches from one line of a wait to another.
REPORTED = {
    "the beacon is raised without a release": (r"fence\.acq_rel\.sys;", "fence.proxy.alias;"),
    "the beacon: with one within the GPU": (r"fence\.acq_rel\.sys", "fence.acq_rel.gpu"),
    "the beacon: with an acquire": (r"fence\.acq_rel\.sys", "fence.acquire.sys"),
    "the beacon is stored within the GPU": (r"st\.relaxed\.sys", "st.relaxed.gpu"),
    "the beacon: with a plain store": (r"st\.relaxed\.sys", "st"),
    "the beacon: one word further": (r"(st\.relaxed\S* \[\$0\+)0\]", r"\g<1>4]"),
    "a peer's beacon is looked at within the GPU": (r"ld\.relaxed\.sys", "ld.relaxed.gpu"),
    "a peer's beacon: with plain loads": (r"ld\.relaxed\.sys", "ld"),
    "a peer's beacon: at one word alone, which is another": (r"(ld\.relaxed\.sys\S* word3, \[\$0\+)12\]", r"\g<1>0]"),
    "a peer's beacon: for a word that is not the key's": (r"setp\.eq\.u32 raised", "setp.ne.u32 raised"),
    "a peer's beacon: until it is not raised": (r"@raised bra", "@!raised bra"),
    "a peer's beacon: once": (r"(@raised bra SEEN;[^}]*)bra LOOK;", r"\1"),
    "a peer's beacon: without an acquire": (r"fence\.acquire\.sys;", ""),
    "a peer's beacon: with an acquire within the GPU": (r"fence\.acquire\.sys", "fence.acquire.gpu"),
    "the count: waited for too long": (r"setp\.ge\.u32 enough", "setp.gt.u32 enough"),
    "the count: not at all": (r"setp\.ge\.u32 enough", "setp.le.u32 enough"),
    "the count: until it is not enough": (r"@!enough", "@enough"),
    "the count: once": (r"@!enough bra LOOK;", ""),
    "the count: without an acquire": (r"fence\.acquire\.gpu;", ""),
    "the count: with a plain load": (r"ld\.relaxed\.gpu", "ld"),
    "the count: without a proxy fence": (r"(fence\.acquire\.gpu;\s*)fence\.proxy\.async\.global;", r"\1"),
    "the count: with the fences the other way round": (
        r"(fence\.acquire\.gpu;)\s*(fence\.proxy\.async\.global;)", r"\2 \1",
    ),
    "the copy engine's fence is one of aliases": (r"fence\.proxy\.async\.global", "fence.proxy.alias"),
    "the copy engine's fence is one of shared memory": (r"fence\.proxy\.async\.global", "fence.proxy.async.shared::cta"),
}  # fmt: skip
# With the reason why the emulator is right to say nothing.
HARMLESS = {
    "in a launch after one that all have left, only the key is ever in these words; what memory held before is not "
    "played through": (r"setp\.eq\.and\.u32 raised, word[123][^;]*;", ""),
    "the warp that looks signals through the generic proxy alone, and the copies come behind the count's own fence": (
        r"(fence\.acquire\.sys;\s*)fence\.proxy\.async\.global;", r"\1",
    ),
    "whoever counts to the last number can only see that one and smaller ones": (
        r"setp\.ge\.u32 enough", "setp.eq.u32 enough"
    ),
    "a larger scope": (r"ld\.relaxed\.gpu", "ld.relaxed.sys"),
    "a sequentially consistent fence is more": (r"fence\.acq_rel\.sys", "fence.sc.sys"),
    "a device knows nothing from its peers when it begins": (r"fence\.acq_rel\.sys", "fence.release.sys"),
    "without a pause": (r"nanosleep\.u32 40;", ""),
}  # fmt: skip


def change(monkeypatch, found, replacement):
    """Has the texts changed from now on; returns how often that has happened."""
    emit, changes = mgpu_utils.inline_ptx, []

    def changed(text, *operands, **keywords):
        text, count = re.subn(found, replacement, text)
        changes.append(count)
        return emit(text, *operands, **keywords)

    monkeypatch.setattr(mgpu_utils, "inline_ptx", changed)
    return changes


def runs():
    for seed in range(9):
        for kernel in (joined_rows, tiles_of_their_own):
            with emulate(cores=2, completion=("eager", "late", "random")[seed % 3], seed=seed, laps=3):
                kernel(3)
            if seed > 2:
                break  # the first kernel is the faster one


@pytest.mark.parametrize("which", REPORTED)
def test_a_wrong_text_is_reported(which, monkeypatch):
    changes = change(monkeypatch, *REPORTED[which])
    with pytest.raises(EmulationError):
        runs()
    assert any(changes), "the handshakes have no such text any more"


@pytest.mark.parametrize("which", HARMLESS)
def test_a_harmless_text(which, monkeypatch):
    changes = change(monkeypatch, *HARMLESS[which])
    runs()
    assert any(changes), "the handshakes have no such text any more"
