"""The program that grades an artefact of MLGym in a sandbox, and the child that alone imports it."""

from __future__ import annotations

_CHILD = """
import ast, importlib, os, resource, sys
calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
for number in (0, 1):
    os.dup2(os.open(os.devnull, os.O_RDWR), number)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.path[:0] = [sys.argv[2], "."]
artefact = importlib.import_module(sys.argv[1])

def plain(value):
    value = value.tolist() if hasattr(value, "tolist") else value
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value

for line in calls:
    name, words, named = ast.literal_eval(line)
    print(repr(plain(getattr(artefact, name)(*words, **named))), file=answers, flush=True)
"""
"""Imports the artefact and answers calls of its functions; it can write no file."""
DRIVER = f"""
import ast, ctypes, os, runpy, subprocess, sys, tempfile, traceback, types
nonce, script, artefact = sys.stdin.readline().strip(), sys.argv[1], sys.argv[2]
sys.argv = [script, *sys.argv[3:]]
sys.path.insert(0, ".")
PR_SET_DUMPABLE = 4
ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)

class Artefact(types.ModuleType):
    child = None

    def __getattr__(self, function):
        if function.startswith("__"):
            raise AttributeError(function)
        return lambda *words, **named: self._call((function, words, named))

    def _call(self, call):
        # Started late: the script has imported and read its own files by then.
        if self.child is None:
            # It cannot write, but rename: what is imported from here on is not from its folder.
            sys.path[:] = [folder for folder in sys.path if folder not in ("", ".")]
            argv = [sys.executable, "-c", {_CHILD!r}, self.__name__, apart]
            pipe = subprocess.PIPE
            self.child = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)
        self.child.stdin.write(f"{{call!r}}\\n")
        self.child.stdin.flush()
        return ast.literal_eval(self.child.stdout.readline(1 << 20))

if artefact.endswith(".py"):
    # A script that loads it by its path finds nothing there.
    apart = tempfile.mkdtemp(dir=".")
    os.rename(artefact, os.path.join(apart, artefact))
    sys.modules[artefact[:-3]] = Artefact(artefact[:-3])
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    # Accept an exit by the script itself, not by code that it called.
    if traceback.extract_tb(end.__traceback__)[-1].filename != script or end.code:
        raise
print()
print(nonce)
"""
"""Runs a grader's script, and prints the nonce if it runs to its end; no other process reads its memory."""
