"""Incidents of the group on configuration, and those of other groups that a run file refuses.

Each test is named after the incident of the same id; its docstring says what had happened.
"""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.spec import AlgorithmSpec, RunSpec, Section, all_keys, explain, load_spec, spec_digest, write_spec
from strop.spec.built_in import built_in_tasks
from strop.spec.job import GPU_SPLIT
from strop.spec.schema import find_settings, sections_of
from strop.tasks import task_summaries

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "strop"
SMALL = 'name = "x"\n[task]\nname = "arithmetic"\n'


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_spec(path, overrides)
    return caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL + "[train]\nprompt_per_step = 4\n", "unknown key train.prompt_per_step (@:5)"),
        (SMALL + "[verifier]\nstrict = true\n", "unknown key verifier (@:4)"),
        (
            SMALL + "[train]\nsteps = 1\nsteps = 2\n",
            "@:6 cannot be read as TOML: a key or table is written twice",
        ),
        (SMALL + "[train]\nsteps = 1\n[train]\nseed = 2\n", "@:6 cannot be read as TOML: a key or table is"),
        (SMALL + "[train]\nsteps = '40'\n", "train.steps='40' (@:5) is not allowed. Allowed: an integer"),
    ],
)
def test_cfg_1_unknown_duplicate_and_mistyped_keys_are_refused(tmp_path: Path, text: str, words: str) -> None:
    """Incident: unknown keys were ignored and of two blocks in one file the last won silently."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    error = refusal(path)
    assert words.replace("@", str(path)) in str(error)
    assert error.exit_code == 2
    assert [item.name for item in tmp_path.iterdir()] == ["run.toml"]


def test_cfg_1_a_misspelt_key_is_answered_with_the_nearest_and_with_all(tmp_path: Path) -> None:
    """Incident: as above; a message without names sends people to the source."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL + "[eval]\nevry = 3\n")
    assert str(refusal(path)).endswith(
        "Allowed: every, num_examples, num_samples, baselines in eval. Next: did you mean eval.every?"
    )


# Settings with two values each that are allowed beside all others here; None is one of them.
CHOICES: dict[str, tuple[object, ...]] = {
    "seed": (1, 2, 3),
    "train.steps": (10, 20, 30),
    "eval.every": (None, 5, 6),
    "eval.num_samples": (None, 2, 3),
    "optimizer.lr": (1e-4, 2e-4, 3e-4),
    "tripwires.on_alarm": ("warn", "stop", "stop-on-collapse"),
    "tripwires.max_stall_s": (None, 1.5),
    "task.config.low": (1, 2, 3),
}
LAYER = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()})


def toml_line(key: str, value: object) -> str:
    if value is None:
        return f'{key} = "none"\n'
    return f'{key} = "{value}"\n' if isinstance(value, str) else f"{key} = {value}\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(base=LAYER, file=LAYER, override=LAYER)
def test_cfg_2_the_winner_over_all_sources_is_what_explain_says(
    tmp_path: Path, base: dict[str, object], file: dict[str, object], override: dict[str, object]
) -> None:
    """Incident: file values beat flags, an explicit null vanished, and no test ever set both.

    The order: default, extended file, file, override. Checked against a loop over plain dicts.
    """
    head = 'name = "x"\ntask.name = "reasoning-gym"\ntask.dataset = "d"\n'
    (tmp_path / "base.toml").write_text(head + "".join(toml_line(*item) for item in base.items()))
    path = tmp_path / "run.toml"
    path.write_text('extends = "base.toml"\n' + "".join(toml_line(*item) for item in file.items()))
    resolved = load_spec(path, [f"{key}={'none' if v is None else v}" for key, v in override.items()])
    for key in CHOICES:
        said = explain(key, resolved)
        if key in override:
            expected: tuple[object, str | None] = (override[key], "override")
        elif key in file:
            expected = (file[key], f"{path}:{2 + list(file).index(key)}")
        elif key in base:
            expected = (base[key], f"{tmp_path / 'base.toml'}:{4 + list(base).index(key)}")
        elif key == "task.config.low":
            expected = (None, None)
        else:
            expected = (find_settings(tuple(key.split(".")))[0].info.default, "default")
        assert (said.value, said.origin) == expected
    again = tmp_path / "again.toml"
    again.write_text(write_spec(resolved))
    assert repr(load_spec(again).spec) == repr(resolved.spec)


def test_cfg_2_contradicting_overrides_are_refused_and_equal_ones_are_fine(tmp_path: Path) -> None:
    """Incident: of two conflicting overrides one was dropped silently."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    error = refusal(path, "train.steps=3", "seed=1", "train.steps=4")
    assert "override train.steps=3 and override train.steps=4 contradict each other" in str(error)
    # 1 and true are equal in Python and not in a run file.
    assert "contradict" in str(refusal(path, "train.steps=1", "train.steps=true"))
    assert load_spec(path, ["train.steps=3", "train={steps = 3}"]).spec.train.steps == 3


@pytest.mark.parametrize("overrides", [("optimizer.lr=nan",), ("optimizer.lr=nan", "optimizer.lr=nan")])
def test_a_nan_is_refused_as_one_and_does_not_contradict_itself(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Incident: NaN does not equal NaN, so one override was said to contradict itself."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    error = str(refusal(path, *overrides))
    assert error.startswith("optimizer.lr=nan (override) is not allowed. Allowed: a number above 0")
    assert "contradict" not in error


def test_cfg_2_what_an_override_of_the_task_drops_is_told(tmp_path: Path) -> None:
    """Incident: settings that no longer applied were dropped without a word."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL + "max_value = 50\n")
    (notice,) = load_spec(path, ["task.name=gsm8k"]).notices
    assert f"task.max_value=50 ({path}:4) is not used" in notice


class _Reads(ast.NodeVisitor):
    """Which settings a module reads, as attribute of something that is a section by name or type."""

    def __init__(self, sections: dict[str, str]) -> None:
        self.sections = sections
        """Class name of a section to the name that a run spec gives it, '' for the whole spec."""
        self.receivers: dict[str, set[str]] = {}
        """Names in this module that hold a section, by annotation."""
        self.found: set[str] = set()

    def scan(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.arg) and node.annotation is not None:
                self._note(node.arg, node.annotation)
            elif isinstance(node, ast.AnnAssign):
                self._note(_last_name(node.target), node.annotation)
            elif isinstance(node, ast.For | ast.comprehension) and "judge_sections(" in ast.unparse(
                node.iter
            ):
                self.receivers.setdefault(_last_name(node.target), set()).add("task")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self._read(node)

    def _note(self, name: str, annotation: ast.expr) -> None:
        for part in ast.walk(annotation):
            if isinstance(part, ast.Name) and part.id in self.sections:
                # A parameter is often stored as self._name.
                for alias in (name, f"_{name}"):
                    self.receivers.setdefault(alias, set()).add(self.sections[part.id])

    def _read(self, node: ast.Attribute) -> None:
        receiver = _last_name(node.value)
        self.found.add(f"{receiver}.{node.attr}")
        for section in self.receivers.get(receiver, ()):
            self.found.add(f"{section}.{node.attr}" if section else node.attr)
        if receiver.endswith("spec"):
            self.found.add(node.attr)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def settings_read_in_source() -> set[str]:
    """Return the dotted settings that some module outside of spec/ reads, or the one that lays out roles."""
    sections = {"RunSpec": "", "TaskSpec": "task", "TaskSection": "task"}
    sections |= dict.fromkeys(("UserTaskSpec", "UserCodeSection", "UserEnvironmentSpec"), "task")
    for task in task_summaries():
        bases = [kind for kind in built_in_tasks().section(task).__mro__ if issubclass(kind, Section)]
        sections |= {kind.__name__: "task" for kind in bases if kind is not Section}
    for name, info in RunSpec.model_fields.items():
        sections |= {kind.__name__: name for kind in sections_of(info)}
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        if "spec" not in path.relative_to(SOURCE).parts or path.name == "layout.py":
            reads = _Reads(sections)
            reads.scan(ast.parse(path.read_text()))
            found |= reads.found
    return found


def test_cfg_3_every_public_setting_has_a_reader() -> None:
    """Incident: settings that were parsed, documented, and read by nothing."""
    missing = [room for room in ("train", "evaluate", "cli") if not any((SOURCE / room).glob("*.py"))]
    if missing:
        pytest.skip(f"these rooms, which read settings, are not in this tree: {', '.join(missing)}")
    # Some settings only say that something else is meant, and the specs' own checks and properties ask them.
    places = [*(SOURCE / "spec").glob("*.py"), SOURCE / "tasks" / "blend.py"]
    checks = "".join(path.read_text() for path in places)
    asked = {
        f"task.{name}" for name in ("can_judge_itself", "max_format_weight", "parts") if f".{name}" in checks
    }
    asked |= {f"job.{name}" for name in GPU_SPLIT if f".{name}" in checks}
    unread = set(all_keys()) - settings_read_in_source() - asked
    assert not unread, f"nothing outside of spec/ reads {sorted(unread)}: read them or remove them"


@pytest.mark.parametrize("name", find_settings(("algorithm", "name"))[0].choices)
def test_cfg_3_every_choice_of_algorithm_can_be_built(name: typing.Any) -> None:
    """Incident: a loss variant that the configuration offered raised NameError when reached."""
    from strop.algorithm.building import build_algorithm

    assert build_algorithm(AlgorithmSpec(name=name)).name == name


def test_cfg_3_a_data_set_smaller_than_a_step_is_refused(tmp_path: Path) -> None:
    """Incident: floor division trained none of 4 examples at batch 8, and said nothing."""
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[task]\nname = "reverse-text"\nnum_train = 4\n')
    message = str(refusal(path))
    assert "train.prompts_per_step=8 (default)" in message
    assert "Allowed: 1 to 4. Next: set train.prompts_per_step to 4" in message
    # 10 examples at 8 per step: steps are counted, not passes over the data, so none is cut off.
    assert load_spec(path, ["task.num_train=10"]).spec.train.prompts_per_step == 8


SITE_CONSTANTS = re.compile(
    r"^/(?:home|root|mnt|media|data|scratch|tmp|opt|usr|var|fsx|efs|shared|workspace|work|Users)\b"
    r"|\b\d{12}\b|^(?:eth|ens|eno|enp|ib|bond)\d\w*$|^(?:s3|gs)://\w|\barn:aws:|\b10\.\d+\.\d+\.\d+\b"
)


# Places that the file system standard gives every Linux, and our own below them: sandboxes and images are
# built of them. A cloud's contract with every account, and the account of its documentation's examples.
STANDARD_PLACES = re.compile(
    r"^/(?:tmp|usr|var|home|opt|root)$|^/var/tmp$|^/tmp/strop|^/opt/(?:strop|ml)\b"
    r"|^/usr(?:/local)?/s?bin\b|^/usr/(?:local)?$"
    # Where images for GPUs look for the driver.
    r"|^/usr/local/nvidia/lib64$"
    # Inside a sandbox.
    r"|^/workspace$|^/tmp/(?:beats-)?$|^/usr/lib/python3/|^/usr/local/lib$|^/var/cache$"
    r"|^/aws/|arn:aws:[a-z]+:+(?:$|\.\.\.)|^123456789012$"
)
STANDARD_ROOMS = ("sandbox", "runtime", "hardware", "run", "launch", "testing")


def texts_of(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the string constants of a module, without its docstrings."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def test_cfg_5_no_constant_of_a_site_is_in_the_source() -> None:
    """Incident: bucket, account, network interface and mount points in library code."""
    found = [
        f"{path.relative_to(ROOT)}:{text.lineno}: {text.value!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        for text in texts_of(ast.parse(path.read_text()))
        if isinstance(text.value, str)
        and SITE_CONSTANTS.search(text.value)
        and not (path.relative_to(SOURCE).parts[0] in STANDARD_ROOMS and STANDARD_PLACES.search(text.value))
    ]
    assert not found, "constants of one site belong into a site profile:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text", ["/mnt/disk/x", "/tmp/x", "123456789012", "eth0", "s3://bucket/x", "10.0.0.7"]
)
def test_cfg_5_the_scan_finds_what_it_looks_for(text: str) -> None:
    (constant,) = texts_of(ast.parse(f"path = {text!r}"))
    assert SITE_CONSTANTS.search(str(constant.value))
    assert not SITE_CONSTANTS.search("/proc/meminfo")


def test_cfg_5_a_run_file_means_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: relative paths failed in workers that were started elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "run.toml"
    text = 'name = "x"\n[task]\nname = "gsm8k"\nsource = "./data"\n[model]\nuri = "../m"\n'
    path.write_text(text + '[output]\nroot = "runs"\n')
    monkeypatch.chdir(tmp_path)
    here = load_spec("run.toml").spec
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = load_spec("../run.toml").spec
    assert here == there
    assert here.output.root == str(tmp_path / "runs")
    # Without output.root, runs go to the current folder; what is asked for stays the same.
    path.write_text(text)
    assert spec_digest(load_spec(path).spec) == spec_digest(here)
    assert load_spec(path).spec.output.root == str(tmp_path / "elsewhere/runs")


@pytest.mark.parametrize(
    "name", sorted(set(find_settings(("algorithm", "name"))[0].choices) - {"reinforce_pp"})
)
def test_opt_4_a_group_of_one_is_refused(tmp_path: Path, name: str) -> None:
    """Incident: the default group size 1 made all advantages zero; seen after ten empty batches."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    message = str(refusal(path, "train.group_size=1", f"algorithm.name={name}"))
    assert message == (
        f"train.group_size=1 (override) and algorithm.name='{name}' (override): every advantage"
        " would be zero, because a rollout is compared with the others of its prompt."
        " Allowed: 2 rollouts per prompt or more, or algorithm.advantage = 'rpp'. Next: set"
        " train.group_size to 8."
    )
    assert load_spec(path, ["train.group_size=2"]).spec.train.group_size == 2


CANARY = "Zq7Zq7Zq7Zq7Zq7Zq7Zq7Zq7"


@pytest.mark.parametrize(
    ("override", "form"),
    [
        (f"model.uri=hf_{CANARY}", "a model hub token"),
        ("model.uri=AKIA" + "Q7" * 8, "an AWS access key"),
        (f"name=sk-{CANARY}", "an API key"),
        (f"task.source=https://ada:{CANARY}@example.org/data", "a password in an address"),
        (f"task.config.api_key={CANARY}", "a credential by its name"),
        (f"task.config.list=[{{x = 'ghp_{CANARY}'}}]", "a GitHub token"),
        (f"hf_{CANARY}=1", "a model hub token"),
        (f"unknown.key=glpat-{CANARY}", "a GitLab token"),
    ],
)
def test_sec_4_a_credential_in_a_run_file_is_refused_and_not_repeated(
    tmp_path: Path, override: str, form: str
) -> None:
    """Incident: tokens in saved configurations and arguments."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    assert f"override holds {form}" in str(refusal(path, override))
    assert CANARY not in str(refusal(path, override))
    assert "Q7Q7" not in str(refusal(path, override))
