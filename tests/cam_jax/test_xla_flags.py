"""`XLA_FLAGS` that XLA would abort the process over are refused before it reads them."""

import jax
import pytest

from cam_jax.errors import MeshError
from cam_jax.xla_flags import backend_started, check_xla_flags, forced_devices, problem_of
from tests.processes import report, run_processes

COUNT = "xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (f"\u2013{COUNT}=4", "U\\+2013 \\(EN DASH\\)"),
        (f"\u2014{COUNT}=4", "U\\+2014 \\(EM DASH\\)"),
        (f"\u2212\u2212{COUNT}=4", "U\\+2212 \\(MINUS SIGN\\)"),
        (f"\u2013-{COUNT}=4", "U\\+2013"),
        (f"--xla_dump_to=x \u2013{COUNT}=4", "U\\+2013"),
        (f"-{COUNT}=4", "does not begin with '--'"),
        (f"{COUNT}=4", "does not begin with '--'"),
        (f'"--{COUNT}=4"', "does not begin with '--'"),
        ("--xla_force_host_platform_devices_count=4", "is misspelt"),
        ("--xla_host_platform_device_count=4", "is misspelt"),
        (f"--{COUNT} = 4", "without spaces"),
        (f"--{COUNT}=four", "needs a number"),
        (f"--{COUNT}=0", "needs a number"),
    ],
)
def test_what_xla_cannot_read_is_refused(flags, said, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with pytest.raises(MeshError, match=said) as caught:
        check_xla_flags()
    assert "append" in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        f"--{COUNT}=4",
        f"--{COUNT}='4'",
        f'--xla_dump_to="a folder \u2013 mine" --{COUNT}=2',
        "--xla_cpu_enable_fast_math=false --xla_cpu_enable_fast_math",
    ],
)
def test_what_xla_can_read_passes(flags):
    assert problem_of(flags) is None


def test_a_file_of_flags_is_left_to_xla(tmp_path):
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=false")
    assert problem_of(str(tmp_path / "flags")) is None
    assert problem_of(str(tmp_path / "missing")) is not None


def test_the_number_that_is_asked_for():
    assert forced_devices("") is None
    assert forced_devices(f"--a=1 --{COUNT}=4") == 4
    assert forced_devices(f"--{COUNT}=4 --{COUNT}='8'") == 8


def test_a_backend_that_runs_is_noticed(devices):
    before = jax.config.jax_num_cpu_devices
    assert backend_started()
    assert jax.config.jax_num_cpu_devices == before


def test_a_pasted_dash_does_not_abort_the_process():
    program = (
        "import cam_jax\n"
        "try: cam_jax.make_mesh(expert=4)\n"
        "except cam_jax.errors.MeshError as error: print(error)\n"
    )
    [ended] = run_processes(
        [["-c", program]], timeout=60, environment={"XLA_FLAGS": f"\u2013{COUNT}=4"}
    )
    assert ended.code == 0, report([ended])
    assert "EN DASH" in ended.output


def test_the_question_whether_jax_has_started_changes_nothing():
    program = (
        "import jax\n"
        "from cam_jax.xla_flags import backend_started\n"
        "assert not backend_started()\n"
        "assert len(jax.devices()) == 3\n"
        "assert backend_started()\n"
    )
    [ended] = run_processes(
        [["-c", program]], timeout=60, environment={"XLA_FLAGS": f"--{COUNT}=3"}
    )
    assert ended.code == 0, report([ended])
