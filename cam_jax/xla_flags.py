"""`XLA_FLAGS`, read before XLA does: XLA ends the whole process over a flag that it cannot read."""

import difflib
import os
import re
import unicodedata

import jax

from cam_jax.errors import MeshError

VARIABLE = "XLA_FLAGS"
DEVICE_COUNT = "--xla_force_host_platform_device_count"
# A quoted value may hold spaces.
_WORD = re.compile(r"""[^\s=]*=(?:"[^"]*"|'[^']*')|\S+""")
# Nearer than this a flag is a typing error; the names of XLA's other flags are all farther away.
_SIMILAR = 0.9


def check_xla_flags() -> None:
    """Refuses what XLA would abort the process over, as far as it can be told without XLA.

    Raises:
        MeshError: a flag that does not begin with two plain hyphens (a pasted en dash), a number of
            devices that is misspelt or cannot be read.
    """
    problem = problem_of(os.environ.get(VARIABLE, ""))
    if problem is not None:
        raise MeshError(
            f"{VARIABLE}: {problem}; XLA would end the process or ignore it. Mend it before "
            "Python starts, and append to what the variable holds: "
            f'XLA_FLAGS="$XLA_FLAGS {DEVICE_COUNT}=n"'
        )


def problem_of(flags: str) -> str | None:
    """What is wrong with the value of `XLA_FLAGS`; None: nothing that can be seen here."""
    words = _WORD.findall(flags)
    if words and not _dashes(words[0]) and os.path.isfile(flags.strip()):
        return None  # XLA reads its flags from that file
    for position, word in enumerate(words):
        dashes, name = _dashes(word), word[len(_dashes(word)) :].partition("=")[0]
        strange = next((sign for sign in dashes if sign != "-"), None)
        if strange is not None:
            return (
                f"{word!r} begins with U+{ord(strange):04X} ({unicodedata.name(strange, '?')}), "
                "as text processors write it, where two plain hyphens belong"
            )
        if not dashes and position:
            continue  # XLA skips it
        if dashes != "--":
            return f"{word!r} does not begin with '--'"
        problem = _device_count_problem(word, f"--{name}")
        if problem is not None:
            return problem
    return None


def forced_devices(flags: str) -> int | None:
    """The number of CPU devices that ``flags`` ask for (the last one counts); None: no number."""
    found = re.findall(rf"(?:^|\s){DEVICE_COUNT}=[\"']?(\d+)", flags)
    return int(found[-1]) if found else None


def backend_started() -> bool:
    """Whether JAX has looked for its devices already, after which nothing can be set any more."""
    number = jax.config.values["jax_num_cpu_devices"]
    try:
        # There is no public question; but JAX refuses to change this once it is too late.
        jax.config.update("jax_num_cpu_devices", number + 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


def _dashes(word: str) -> str:
    """The hyphens and their look-alikes at the beginning."""
    end = 0
    while end < len(word) and (unicodedata.category(word[end]) == "Pd" or word[end] == "\u2212"):
        end += 1
    return word[:end]


def _device_count_problem(word: str, name: str) -> str | None:
    if name != DEVICE_COUNT:
        similar = difflib.SequenceMatcher(None, name, DEVICE_COUNT).ratio() >= _SIMILAR
        return f"{name!r} is misspelt, it is called {DEVICE_COUNT!r}" if similar else None
    if not forced_devices(word):
        return f"{word!r} needs a number of at least 1, without spaces: {DEVICE_COUNT}=n"
    return None
