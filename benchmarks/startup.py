"""How long a privacy question takes from the shell, beside what its neighbours take to import.

Run: .venv/bin/python benchmarks/startup.py
"""

import statistics
import subprocess
import sys
import time

QUESTION = "account --noise 1 --rate 0.01 --steps 1000"
COMMANDS = {
    "hush account": f"import sys; sys.argv = 'hush {QUESTION}'.split(); import hush.__main__",
    "import hush": "import hush",
    "import dp_accounting": "import dp_accounting",
    "import torch": "import torch",
    "python alone": "pass",
}
REPEATS = 7


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, code in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
            times[name].append(time.perf_counter() - start)
    for name, seconds in times.items():
        print(f"{name:22} {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
