"""Build `.types/`: links that show a type checker the package as it is once installed.

`models/` and `conversion/` are `cam_jax.models` and `cam_jax.conversion` by the `package_dir` of
setup.py, which type checkers do not follow. Nothing in `.types/` is committed.
"""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    tree = ROOT / ".types"
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "cam_jax"
    package.mkdir(parents=True)
    parts = [path for path in (ROOT / "cam_jax").iterdir() if path.name != "__pycache__"]
    for part in [*parts, ROOT / "models", ROOT / "conversion"]:
        (package / part.name).symlink_to(part)


if __name__ == "__main__":
    main()
