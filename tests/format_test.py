#!/usr/bin/env python3
"""Every C++ file is as .clang-format has it. Skipped without clang-format 14 (Debian 12's): other versions differ in small things."""
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77


def main():
    program = shutil.which("clang-format-14") or shutil.which("clang-format")
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout if program else ""
    if not re.search(r"version 14\.", version):
        print("skipped: clang-format 14 is not installed (Debian package clang-format)")
        return SKIPPED
    files = [p for folder in ("common", "services", "tests") for p in sorted((ROOT / folder).rglob("*")) if p.suffix in (".h", ".cc")]
    result = subprocess.run([program, "--dry-run", "--Werror", *map(str, files)], capture_output=True, text=True)
    wrong = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", result.stderr, re.M)))
    for path in wrong:
        print(f"{path}: not as .clang-format has it; mend with: clang-format -i {path}")
    print(f"{len(files)} files, {len(wrong)} to be formatted")
    return 1 if wrong or result.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
