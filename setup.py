"""Which packages there are and where they lie; everything else is in pyproject.toml.

`models/` and `conversion/` stand at the top of the repository and install inside `cam_jax`, so
that neither claims a global name. Packages are looked up, not listed: none can be forgotten.
"""

from setuptools import find_packages, setup

INSIDE = ["models", "conversion"]

setup(
    packages=[
        *find_packages(include=["cam_jax", "cam_jax.*"]),
        *(
            f"cam_jax.{package}"
            for folder in INSIDE
            for package in find_packages(include=[folder, f"{folder}.*"])
        ),
    ],
    package_dir={f"cam_jax.{folder}": folder for folder in INSIDE},
)
