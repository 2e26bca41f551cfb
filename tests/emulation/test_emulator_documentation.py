"""The example of docs/EMULATION.md runs as it is printed."""

import re
import subprocess
import sys


def test_the_example(repository):
    text = (repository / "docs" / "EMULATION.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    code = code.replace("import jax\n", 'import jax\njax.config.update("jax_platforms", "cpu")\n', 1)
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()[:2]
    assert first == "8 copies, 4 signals", done.stderr
    assert second.startswith("exit device 0 may leave the kernel before"), done.stdout
