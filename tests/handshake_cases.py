"""Defects of the handshakes, for the tests on the emulator and on GPUs."""

from overlap.primitives import handshake

WAITS = ("own_ctas", "being_seen", "the_peers_end")


def leave_out(act):
    """A defect: one act at the beacons (`_raise`, `_await`, `_lower`) does not happen."""

    def defect(patch):
        left_out, do = getattr(handshake, act), handshake._act
        patch.setattr(handshake, "_act", lambda each, flag: None if each is left_out else do(each, flag))

    defect.__name__ = f"leave_out{act}"
    return defect


def without_waiting_for(*names):
    """A defect: some of the three waits of a kernel's exit handshake (`WAITS`, in this order) are left out."""

    def defect(patch):
        wait, count = handshake.wait_at_least, [0]

        def wait_or_not(flag, value, *, from_peer=False):
            count[0] += 1
            if WAITS[(count[0] - 1) % len(WAITS)] not in names:
                wait(flag, value, from_peer=from_peer)

        patch.setattr(handshake, "wait_at_least", wait_or_not)

    defect.__name__ = "_and_".join(("without_waiting_for", *names))
    return defect


def act_first(patch, on, before):
    """Calls `before(beacon)` in front of each act `on` at a beacon."""
    do = handshake._act

    def act(each, flag):
        if each is on:
            before(flag)
        do(each, flag)

    patch.setattr(handshake, "_act", act)
