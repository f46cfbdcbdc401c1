"""Run the benchmarks: `python -m benchmarks --help`."""

from benchmarks.run import main

if __name__ == "__main__":
    raise SystemExit(main())
