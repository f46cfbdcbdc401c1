"""Tests of the judge of Python programs, in the best sandbox of this host: honest programs, and attacks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from strop.errors import SandboxError
from strop.rollout import Outcome
from strop.sandbox import ExecKind, ExecResult
from strop.tasks.code.judge import JudgeJob, judge_python, read_verdict
from strop.tasks.code.runner import RESULTS, is_same, is_same_output
from tests.fixtures.sandboxed import best_level
from tests.fixtures.sandboxes import needs_podman


def judged(source: str, *tests: str, level: Any = None, **given: Any) -> Outcome:
    words = {"names": ("f",), "wall_s": 60.0, **given}
    job = JudgeJob(source=source, tests=tests, num_tests=len(tests), **words)
    return asyncio.run(judge_python(job, min_isolation=level or best_level()))


def run_tests(
    source: str, inputs: list[Any], outputs: list[Any], name: str = "", level: Any = None, **more: Any
) -> Outcome:
    job = JudgeJob(
        source=source,
        names=(name,) if name else (),
        input_output=json.dumps({"inputs": inputs, "outputs": outputs}),
        num_tests=len(inputs),
        wall_s=60.0,
        **more,
    )
    return asyncio.run(judge_python(job, min_isolation=level or best_level()))


def counts(verdict: Outcome) -> tuple[float, ...]:
    return tuple(verdict.metrics[f"tests_{name}"] for name in RESULTS)


HONEST = {
    "keywords of all names": (
        "def f(target, operation, self):\n  target.append(operation)\n  return target",
        "xs = []\nf(target=xs, operation=1, self=2)\nassert f(target=xs, operation=3, self=4) == [1, 3]",
    ),
    "types": (
        "def f(x): return {1: (x, {x}), None: [True, 1.5, b'a']}",
        "assert f(2) == {1: (2, {2}), None: [True, 1.5, b'a']}",
    ),
    "emptiness": (
        "from collections import deque\ndef f(n): return deque(range(n))",
        "assert f(1) and not f(0)",
    ),
    "true": ("def f(): return True", "assert f() is True"),
    "counter": (
        "from collections import Counter\ndef f(s): return Counter(s)",
        "assert f('aab') == {'a': 2, 'b': 1}",
    ),
    "generator": (
        "def f(n):\n  for i in range(n): yield i",
        "assert list(f(3)) == [0, 1, 2] and sum(f(3)) == 3",
    ),
    "type as argument": ("def f(x, t): return type(x) is t", "assert f(1, int) and not f('1', int)"),
    "big number": ("def f(n): return 10 ** n", "assert f(6000) == 10 ** 6000"),
    "prints": ("def f(x):\n  print('x' * 10**6)\n  return x", "assert f(1) == 1"),
    "main block": ("def f(x): return x\nif __name__ == '__main__':\n  f(input())", "assert f(1) == 1"),
    "data class": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  a: int\ndef f(x): return P(x)",
        "assert f(3).a == 3",
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return P(n, 2)",
        "assert f(1).x == 1 and f(1) == (1, 2)",
    ),
    "standard library": (
        "import datetime, decimal\ndef f(x): return datetime.date(x, 2, 3), decimal.Decimal('1.5')",
        "import datetime, decimal\nassert f(2024) == (datetime.date(2024, 2, 3), decimal.Decimal('1.50'))",
    ),
    "state": ("n = []\ndef f(x):\n  n.append(x)\n  return n", "assert f(1) == [1] and f(2) == [1, 2]"),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name: str) -> None:
    verdict = judged(*HONEST[name])
    assert verdict.is_correct


def test_classes_of_the_program_are_used_by_tests_and_setup() -> None:
    source = (
        "class Node:\n  def __init__(self, v): self.v, self.left = v, None\n"
        "def depth(n): return 0 if n is None else 1 + depth(n.left)\n"
        "def pairs(ps): return [p.v for p in ps]"
    )
    verdict = judged(
        source,
        "assert depth(root) == 2",
        "assert pairs([Node(1), Node(2)]) == [1, 2]",
        "assert root.left.v == 5",
        names=("depth", "pairs", "Node"),
        setup="root = Node(4)\nroot.left = Node(5)",
    )
    assert counts(verdict) == (3, 0, 0, 0)


def test_rew_5_tests_are_counted_by_what_became_of_them() -> None:
    source = "def f(x):\n  if x == 2: raise KeyError(x)\n  if x == 3:\n    while 1: pass\n  return x"
    tests = [f"assert f({x}) == {y}" for x, y in ((1, 1), (1, 9), (2, 2), (3, 3), (4, 4))]
    # Behind the endless call none is run. The order decides no verdict.
    assert counts(judged(source, *tests, test_s=3.0)) == (1, 1, 1, 2)
    assert counts(judged(source, *tests[::-1], test_s=3.0)) == (1, 0, 0, 4)


def test_all_tests_share_one_time_limit() -> None:
    verdict = judged("def f(x):\n  while 1: pass", *["assert f(1) == 1"] * 50, wall_s=1.0)
    assert counts(verdict) == (0, 0, 0, 50)


FIND_EXPECTED = """
import gc, os, re, sys
def look():
    texts = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    frame = sys._getframe()
    while frame:
        texts += [repr(frame.f_locals), repr(frame.f_globals)]
        frame = frame.f_back
    pids = {os.getpid(), os.getppid(), *(int(p) for p in os.listdir('/proc') if p.isdigit())}
    for pid in pids:
        for name in ('cmdline', 'environ', 'fd/0', 'fd/1', 'maps'):
            try:
                with open(f'/proc/{pid}/{name}', 'rb') as file:
                    texts.append(file.read(1 << 20).decode('latin-1'))
            except OSError:
                pass
        try:
            with open(f'/proc/{pid}/maps') as maps, open(f'/proc/{pid}/mem', 'rb') as memory:
                for line in maps:
                    start, end = (int(x, 16) for x in line.split()[0].split('-'))
                    if 'rw' in line and end - start < 1 << 26:
                        memory.seek(start)
                        texts.append(memory.read(end - start).decode('latin-1'))
        except (OSError, ValueError):
            pass
    return texts
def f(x):
    for text in look():
        # The mark stands apart here, so that this source is not what is found.
        found = re.search('se' + r'cret-(\\d+)', text)
        if found:
            return 'se' + 'cret-' + found.group(1)
"""
FORGE = """
import os, json
def f(x):
    for fd in range(64):
        for text in ('started abc', json.dumps({'nonce': 'abc', 'counts': {'passed': 1}, 'total': 1})):
            try: os.write(fd, (text + '\\n').encode())
            except OSError: pass
    print(json.dumps({'counts': {'passed': 1}, 'total': 1}), flush=True)
    os._exit(0)
"""
ALWAYS_EQUAL = """
class A:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 2
    def __lt__(self, other): return True
    def __index__(self): return 2
def f(x): return A()
"""
SEIZE = """
import sys
WORDS = ("pass", "score", "reward", "correct", "success", "result", "is_right", "verdict")
def seize(names):
    for key in list(names):
        if any(word in str(key).lower() for word in WORDS):
            try:
                names[key] = (lambda *a, **k: True) if callable(names[key]) else type(names[key])(1)
            except Exception:
                pass
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    seize(frame.f_globals)
    seize(frame.f_locals)
for module in list(sys.modules.values()):
    seize(vars(module))
def f(x): return 3
"""
FIND_JUDGE = "import os\njudge = os.getppid()"
ABOVE_JUDGE = """import os, re
above = int(re.search('PPid:\\s*(\\d+)', open(f'/proc/{os.getppid()}/status').read()).group(1))"""
ATTACKS = {
    "exit at once": "import os; os._exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef f(x): sys.exit(0)",
    "SystemExit": "def f(x): raise SystemExit",
    "keyboard interrupt": "def f(x): raise KeyboardInterrupt",
    "assertion of its own": "def f(x): raise AssertionError",
    "end of iteration": "def f(x): raise StopIteration(2)",
    "forged verdict": FORGE,
    "always equal": ALWAYS_EQUAL,
    "always equal class": ALWAYS_EQUAL + "f = A",
    "always equal text": "class S(str):\n  __hash__ = str.__hash__\n"
    "  def __eq__(s, o): return True\ndef f(x): return S()",
    "always equal list": "class L(list):\n  def __eq__(s, o): return True\ndef f(x): return L()",
    "not a number": "def f(x): return float('nan')",
    "patched built-ins": "import builtins, unittest\n"
    "builtins.AssertionError = builtins.BaseException = object\nbuiltins.exec = lambda *a: None\n"
    "builtins.compile = builtins.exec\nunittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 3",
    "patched modules": "import json, socket, struct, sys\njson.dumps = json.loads = lambda *a, **k: None\n"
    "sys.modules.clear()\ndef f(x): return 3",
    "patched judge": "import sys\nfor m in list(sys.modules.values()):\n  if 'strop' in m.__name__:\n"
    "    for n in list(vars(m)):\n      if callable(vars(m)[n]): setattr(m, n, lambda *a, **k: True)\n"
    "def f(x): return 3",
    "changes names of its judge": SEIZE,
    "empties its tests": "import gc\nfor found in gc.get_objects():\n"
    "  if type(found) is list and found and all(type(x) is str and 'assert' in x for x in found):\n"
    "    found.clear()\ndef f(x): return 3",
    "stops the clock": "import signal, time\ntime.time = time.monotonic = time.perf_counter = lambda: 0.0\n"
    "signal.signal(signal.SIGALRM, signal.SIG_IGN)\ndef f(x): return 3",
    "kills its group": "import os\nos.killpg(0, 9)\ndef f(x): return 3",
    "kills its judge": f"{FIND_JUDGE}\nos.kill(judge, 9)\ndef f(x): return 3",
    "kills its judge in the call": f"{FIND_JUDGE}\ndef f(x): os.kill(judge, 9)",
    "kills what is above its judge": f"{ABOVE_JUDGE}\nos.kill(above or -1, 9)\ndef f(x): return 3",
    "interrupts its judge": f"{FIND_JUDGE}\ndef f(x): os.kill(judge, 2)",
    "rings its judge's alarm": f"{FIND_JUDGE}\ndef f(x):\n  os.kill(judge, 14)\n  return 3",
    "closes everything": "import os\nos.closerange(0, 256)\ndef f(x): return 3",
    "fork, and the parent exits": "import os\nif os.fork(): os._exit(0)\ndef f(x): return 3",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 3",
    "no function": "g = 1",
    "not callable": "f = 2",
    "prints for ever": "def f(x):\n  while 1: print('x' * 10**5, flush=True)",
    "recursion": "def f(x): return f(x)",
    "crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "memory": "def f(x): return 'x' * 10**12",
    "memory, bit by bit": "def f(x):\n  a = []\n  while 1: a.append(bytearray(10**7))",
    "processes": "import os\ndef f(x):\n  while 1:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\ndef f(x):\n"
    "  while 1: threading.Thread(target=time.sleep, args=(9,)).start()",
    "fills the disk": "def f(x):\n  with open('a', 'wb') as a:\n    while 1: a.write(b'x' * 10**6)",
    "huge reply": "def f(x): return ['x' * 1000] * 100_000",
    "endless iterator": "import itertools\ndef f(x): return itertools.count()",
    "contains itself": "def f(x):\n  a = []\n  a.append(a)\n  return a",
    "network": "import urllib.request as u\ndef f(x): return u.urlopen('http://192.0.2.1', timeout=1).read()",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_nothing(name: str) -> None:
    verdict = judged(
        ATTACKS[name], "assert f(1) == 2", "assert f(1) in [2]", "assert not f(1) != 2", wall_s=1.5
    )
    assert verdict.metrics["tests_passed"] == 0
    assert verdict.metrics["tests_total"] == 3


PLANTS = """
import os, sys
home = os.path.expanduser("~")
version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
for folder in (".", home, f"{home}/.local/lib/{version}/site-packages", f"{home}/bin"):
    os.makedirs(folder, exist_ok=True)
    for name in ("conftest", "sitecustomize", "usercustomize", "test_all", "json", "unittest", "pytest"):
        with open(f"{folder}/{name}.py", "w") as file:
            file.write("import os\\nos._exit(0)\\n")
    with open(f"{folder}/first.pth", "w") as file:
        file.write("import os; os._exit(0)\\n")
    for name in ("python", "python3", "pytest", "git", "sh"):
        with open(f"{folder}/{name}", "w") as file:
            file.write("#!/bin/sh\\necho '1 passed'\\nexit 0\\n")
        os.chmod(f"{folder}/{name}", 0o755)
os.environ["PATH"] = f"{os.getcwd()}:{home}/bin"
os.environ["PYTHONPATH"] = os.environ["PYTHONSTARTUP"] = os.getcwd()
"""
REWRITES = """
import os, time
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 256)
    while True:
        for top, _, names in os.walk("."):
            for name in names:
                try:
                    with open(f"{top}/{name}", "w") as file:
                        file.write("def f(x): return 2\\n")
                except OSError:
                    pass
        time.sleep(0.001)
"""
EXIT_CODES = """
import atexit, os, signal, sys
sys.exit = os.abort = quit = exit = lambda *a: None
atexit.register(lambda: os._exit(0))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
    signal.signal(number, lambda *a: os._exit(0))
sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)
"""
TAMPERING = {
    "planted modules and programs": PLANTS,
    "a daemon that rewrites files": REWRITES,
    "patched ends": EXIT_CODES,
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_changes_no_reward(name: str) -> None:
    """Neither that of a wrong program nor that of a right one."""
    for value, passed in ((2, 2), (3, 0)):
        source = f"def f(x): return {value}"
        tests = ("assert f(1) == 2", "assert f(2) in [2]")
        untouched = judged(source, *tests)
        assert untouched.metrics["tests_passed"] == passed
        assert counts(judged(TAMPERING[name] + source, *tests)) == counts(untouched)


@pytest.mark.parametrize("x", [0, 1, 2])
def test_a_right_program_that_kills_its_parent_always_loses_all_its_tests(x: int) -> None:
    """Incident: some such programs were paid: a reply races with the end that follows the parent's.

    Here in the call of the first test or the last, or, with 0, while it is loaded.
    """
    source = f"import os\ndef f(x):\n  if x == {x}: os.kill(os.getppid(), 9)\n  return 2 * x\nloaded = f(0)"
    assert {counts(judged(source, "assert f(1) == 2", "assert f(2) == 4")) for _ in range(20)} == {
        (0, 0, 2, 0)
    }


@pytest.mark.slow
def test_a_stopped_judge_is_a_time_out() -> None:
    verdict = judged(f"{FIND_JUDGE}\nos.kill(judge, 19)\ndef f(x): return 3", "assert f(1) == 2", wall_s=0.5)
    assert counts(verdict) == (0, 0, 0, 1)


def test_a_program_finds_no_expected_value() -> None:
    verdict = judged(FIND_EXPECTED, "assert f(1) == 'secret-4711'")
    assert counts(verdict) == (0, 1, 0, 0)
    # It would have found it, had it been there.
    assert judged(FIND_EXPECTED + "kept = ['secret-4711']", "assert f(1) == 'secret-4711'").is_correct


def test_a_program_has_no_descriptor_of_its_judge() -> None:
    source = (
        "import os\nhere = '/proc/self/fd'\n"
        "def f(_):\n  ends = [f'{here}/{n}' for n in os.listdir(here)]\n"
        "  return sorted(os.readlink(end)[:7] for end in ends if os.path.lexists(end))\n"
        "def end(): os._exit(0)"
    )
    # Beside the three empty ones its own connection.
    shown = "assert f(1) == ['/dev/nu'] * 3 + ['socket:']"
    assert counts(judged(source, shown, "end()", shown, names=("f", "end"))) == (1, 0, 2, 0)


def test_a_forged_reply_is_a_value_at_most() -> None:
    source = (
        "import os\ndef f(x):\n  for fd in range(3, 64):\n"
        "    try: os.write(fd, %r)\n    except OSError: pass\n  return 3"
    )
    raised = '["tuple","raised",%s,["tuple"]]'
    values = (
        "{}",
        "[]",
        "7",
        '["tuple","value",["ref",-1]]',
        raised % '"SystemExit"',
        raised % '"exec"',
        raised % "7",
    )
    for forged in values:
        assert judged(source % f"{forged}\n".encode(), "assert f(1) == 2").metrics["tests_passed"] == 0
    # What it sends itself is what it returned.
    assert judged(source % b'["tuple","value",2]\n', "assert f(1) == 2").is_correct


def test_names_of_the_data_set_are_not_the_programs_to_change() -> None:
    # The check leans on `total`; a program that redefines it, or `sum`, changes its own only.
    setup = "def total(xs): return sum(xs)"
    source = "def total(xs): return 10\ndef sum(xs): return 10\ndef f(x): return [x]"
    assert counts(judged(source, "assert total(f(3)) == 10", setup=setup)) == (0, 1, 0, 0)
    assert counts(judged(source, "assert total(f(3)) == 3", setup=setup)) == (1, 0, 0, 0)


def test_a_tested_name_that_is_missing_is_not_the_built_in_one() -> None:
    verdict = judged("def f(x): return x", "assert f(1) == 1", "assert sum([1, 2]) == 3", names=("f", "sum"))
    assert counts(verdict) == (1, 0, 1, 0)


def test_a_program_reads_and_prints() -> None:
    verdict = run_tests("n = int(input())\nprint(n * 2)", ["1\n", "2", ["3", ""]], ["2\n", "4", ["6", ""]])
    assert counts(verdict) == (3, 0, 0, 0)


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.stdout.write(str(int(sys.stdin.readline()) * 2)); sys.exit(0)",
        "import sys\nn = int(sys.stdin.buffer.read())\nsys.stdout.buffer.write(b'%d' % (n * 2))",
        "import os\nos.write(1, b'%d' % (int(os.read(0, 9)) * 2))",
        "import threading\nt = threading.Thread(target=lambda: print(int(input()) * 2))\nt.start()",
        "import atexit\nn = int(input())\natexit.register(lambda: print(n * 2))",
        "def main():\n  print(int(open(0).read()) * 2)\nif __name__ == '__main__': main()",
    ],
)
def test_ways_to_read_and_print(source: str) -> None:
    assert run_tests(source, ["1\n", "2\n"], ["2", "4"]).is_correct


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(3)", (0, 2, 0, 0)),
        ("print(2); raise SystemExit(1)", (0, 0, 2, 0)),
        ("import os; print(2, flush=True); os.abort()", (0, 0, 2, 0)),
        ("print('2 ' * 10**6)", (0, 2, 0, 0)),
        ("while 1: pass", (0, 0, 0, 2)),
        ("import os\nos.kill(os.getppid(), 9)\nprint(2)", (0, 0, 2, 0)),
        ("print(2", (0, 0, 2, 0)),
        ("import os; os.closerange(3, 99); os.fork(); os._exit(0)", (0, 2, 0, 0)),
    ],
)
def test_programs_that_do_not_pass(source: str, expected: tuple[int, int, int, int]) -> None:
    # Only the endless one needs the limit.
    test_s = 1.0 if expected == (0, 0, 0, 2) else 30.0
    verdict = run_tests(source, ["1\n", "1\n"], ["2", "2"], test_s=test_s)
    assert counts(verdict) == expected


def test_one_programs_files_and_state_do_not_reach_the_next_run() -> None:
    source = "import sys\nn = getattr(sys, 'kept', 0) + 1\nsys.kept = n\nprint(n)"
    assert run_tests(source, ["", ""], ["1", "1"]).is_correct


@pytest.mark.parametrize(
    ("source", "is_right"),
    [
        ("def add(a, b): return a + b", True),
        ("class Solution:\n  def add(self, a, b): return a + b", True),
        ("add = lambda a, b: a + b", True),
        ("def add(a, b): return a - b", False),
        ("class Other:\n  def add(self, a, b): return a + b", False),
        ("print(int(input()) + int(input()))", False),
    ],
)
def test_a_function_is_called(source: str, is_right: bool) -> None:
    assert run_tests(source, [[1, 2], [3, 4]], [3, [7]], name="add").is_correct is is_right


def test_arguments_and_results_are_json() -> None:
    source = "def swap(table): return {value: key for key, value in table.items()}, (1, 2)"
    # Keys that are whole numbers come back as such; a result's keys are compared as texts.
    verdict = run_tests(source, [[{"1": 5, "2": 6}]], [[{"5": 1, "6": 2}, [1, 2]]], name="swap")
    assert verdict.is_correct


def test_numbers_of_many_digits_are_read() -> None:
    number = "9" * 5000
    job = JudgeJob(
        source="def f(x): return x + 1",
        names=("f",),
        input_output=f'{{"inputs": [[{number}]], "outputs": [1{"0" * 5000}]}}',
        num_tests=1,
    )
    assert asyncio.run(judge_python(job, min_isolation=best_level())).is_correct
    assert run_tests("print(int(input()) + 1)", [number], ["1" + "0" * 5000]).is_correct


@pytest.mark.slow
@needs_podman
def test_a_container_judges_as_other_sandboxes_do() -> None:
    for source, is_right in (("import numpy\ndef f(x): return x + 1", True), ("def f(x): return x", False)):
        verdict = run_tests(source, [[1]], [2], "f", level="container")
        assert (verdict.is_correct, verdict.isolation) == (is_right, "container"), verdict


@pytest.mark.parametrize(
    ("got", "expected", "is_right"),
    [
        ("1 2\n3", "1\n2 3\n", True),
        ("1 2", "2 1", False),
        ("1", "1 1", False),
        ("0.3333333", "0.33333333", True),
        ("0.3333", "0.33333333", False),
        ("1000001", "1000000", False),
        ("1000000.0", "1000000", True),
        ("1e+16", "10000000000000000", True),
        ("9" * 4000, "9" * 3999 + "8", False),
        ("01" * 60_000, "01" * 60_000, True),
        ("3", "3.0", True),
        ("-5", "5", False),
        ("-0", "0", True),
        ("007", "7", True),
        ("7", "007", False),
        ("0011 1.0", "0011 1", True),
        ("nan", "1.5", False),
        ("1_0", "10.0", False),
        ("YES", "yes", False),
        ("", "", True),
        ("", "1", False),
    ],
)
def test_outputs_by_hand(got: str, expected: str, is_right: bool) -> None:
    assert is_same_output(got, expected) is is_right


@pytest.mark.parametrize(
    ("got", "expected", "is_right"),
    [
        ((1, 2), [1, 2], True),
        ([2, 1], [1, 2], False),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a"}, {"1": "a", "2": "b"}, False),
        ([3], 3, False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (0.1 + 0.2 - 0.3, 0.0, True),
        ("3", 3, False),
        (None, None, True),
        (None, 0, False),
        ({1}, [1], False),
    ],
)
def test_values_by_hand(got: Any, expected: Any, is_right: bool) -> None:
    assert is_same(got, expected) is is_right


def result(stdout: str, kind: ExecKind, exit_code: int | None = None, stderr: str = "") -> ExecResult:
    return ExecResult(
        kind=kind,
        exit_code=exit_code,
        signal=None,
        stdout=stdout.encode(),
        stderr=stderr.encode(),
        stdout_total=len(stdout),
        stderr_total=len(stderr),
        oom_kills=0,
        duration_s=1.0,
        cpu_s=0.5,
    )


JOB = JudgeJob(source="", num_tests=2)


@pytest.mark.parametrize(
    ("kind", "exit_code", "num_timed_out"),
    [
        (ExecKind.SIGNALED, None, 0),
        (ExecKind.OOM, None, 0),
        (ExecKind.FROM_INSIDE, None, 0),
        (ExecKind.EXITED, 137, 0),
        (ExecKind.TIMED_OUT, None, 2),
    ],
)
def test_a_judge_that_the_program_ended_is_a_wrong_answer(
    kind: ExecKind, exit_code: int | None, num_timed_out: int
) -> None:
    verdict = read_verdict(JOB, "n1", result("n1 started\n", kind, exit_code), "namespace")
    assert counts(verdict) == (0, 0, 2 - num_timed_out, num_timed_out)


@pytest.mark.parametrize(
    "silent",
    [
        result("", ExecKind.SIGNALED),
        result("", ExecKind.TIMED_OUT),
        result("other started\n", ExecKind.SIGNALED),
        result("n1 started\n", ExecKind.EXITED, 1, "Traceback: no memfd"),
        result("n1 started\n", ExecKind.EXITED, 0),
        result('other started\nother {"counts": {"passed": 2}}', ExecKind.EXITED, 0),
        result('n1 started\nn1 {"counts": {"passed": 1}}', ExecKind.EXITED, 0),
        result('n1 started\nn1 {"counts": {"passed": 2}}', ExecKind.EXITED, 1),
        result("", ExecKind.NOT_STARTED, 127),
    ],
)
def test_a_judge_that_failed_gives_no_score(silent: ExecResult) -> None:
    with pytest.raises(SandboxError, match="gave no verdict"):
        read_verdict(JOB, "n1", silent, "namespace")


@pytest.mark.parametrize("broken", [{"tests": ("assert (",)}, {"setup": "x ="}])
def test_tests_that_are_no_python_give_no_score(broken: dict[str, Any]) -> None:
    given = dict(broken)
    with pytest.raises(SandboxError, match="gave no verdict"):
        judged("def f(x): return x", *given.pop("tests", ("assert f(1) == 1",)), **given)
