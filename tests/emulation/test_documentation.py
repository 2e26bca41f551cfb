"""Tests that the examples of docs/EMULATION.md run as they are printed."""

import re
import subprocess
import sys


def test_the_examples(repository):
    text = (repository / "docs" / "EMULATION.md").read_text()
    code, late, sequences = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    # The second example uses a user's functions and their expected results without defining them. Define them here.
    code += late + "\na, b = True, True\nalong_x = along_y = run\n" + sequences.replace("range(100)", "range(3)")
    code += "print(len(results))\nfor launch, result in zip((y, y, x, x), results):\n"
    code += "    np.testing.assert_array_equal(result, launch.outputs)\n"
    code = code.replace("import jax\n", 'import jax\njax.config.update("jax_platforms", "cpu")\n', 1)
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()[:2]
    late = [line for line in done.stdout.splitlines() if line.endswith("begins its copy last")]
    assert late == [f"device {victim} begins its copy last" for victim in range(4)], done.stderr
    assert first == "8 copies, 4 signals", done.stderr
    assert second.startswith("exit device 0 may leave the kernel before"), done.stdout
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "4", done.stderr
