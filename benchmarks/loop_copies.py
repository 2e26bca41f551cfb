"""Searches the HLO of a compiled loop for copies of whole operands, which every measured time would contain."""

from __future__ import annotations

import re

import numpy as np

# Smaller copies inside the loop cost nothing that can be measured.
_COPY_THRESHOLD_BYTES = 1 << 16


def copies_in_loops(hlo: str) -> list[str]:
    """Returns the instructions in an optimized module's loop bodies that copy at least `_COPY_THRESHOLD_BYTES`."""
    found = []
    for body in set(re.findall(r"\bwhile\(.*?body=%?([\w.-]+)", hlo)):
        block = re.search(rf"^%?{re.escape(body)} \(.*?^}}", hlo, re.MULTILINE | re.DOTALL)
        for line in block[0].splitlines() if block else ():
            match = re.match(r"\s*(?:ROOT )?%?(?P<name>[\w.-]+) = \(?(?P<type>\w+)\[(?P<dims>[\d,]*)\]", line)
            if match is None or not re.search(r"\bcopy(-start)?\(|wrapped_copy|copy_fusion", line):
                continue
            bits = re.search(r"\d+", match["type"])
            size = int(np.prod([int(dim) for dim in match["dims"].split(",") if dim], dtype=np.int64))
            if size * (int(bits[0]) if bits else 8) // 8 >= _COPY_THRESHOLD_BYTES:
                found.append(f"{match['name']}: {match['type']}[{match['dims']}]")
    return sorted(found)
