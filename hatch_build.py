"""Compiles the CPU kernels while the package is built: one library for each instruction set of this kind of processor.

The package chooses among them when it runs. Where there is no compiler it is built without, and computes with torch.
By hand, after a change of the sources: `python hatch_build.py`.
"""

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
SOURCES = ROOT / "src/legato/kernels/native"
LIBRARIES = ROOT / "src/legato/kernels/lib"

COMMON = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fvisibility=hidden"]
AVX512 = ["-march=skylake-avx512", "-mprefer-vector-width=512"]
LEVELS = {
    "x86_64": {
        "portable": [],
        "avx2": ["-mavx2", "-mfma", "-mtune=haswell"],
        "avx512": AVX512,
        "amx": [*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {"portable": []},
}
sources_digest = runpy.run_path(str(ROOT / "src/legato/kernels/sources.py"))["sources_digest"]
LEVELS["AMD64"], LEVELS["arm64"] = LEVELS["x86_64"], LEVELS["aarch64"]


def compile_kernels(compiler: list[str], machine: str, target: Path = LIBRARIES) -> list[Path]:
    """Build the libraries of every instruction set of `machine`.

    Returns:
        Their files, of those that the compiler could build: an old one knows no AMX.

    Raises:
        RuntimeError: it could build none. Says what it printed.
    """
    target.mkdir(exist_ok=True)
    built, errors = [], []
    levels = LEVELS.get(machine, {"portable": []})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        libraries = {level: target / f"liblegato_{level}.so" for level in levels}
        tasks = {level: pool.submit(_compile, compiler, level, levels[level], libraries[level]) for level in levels}
    for level, task in tasks.items():
        error = task.exception()
        if error is None:
            built.append(libraries[level])
        elif isinstance(error, subprocess.CalledProcessError | OSError):
            libraries[level].unlink(missing_ok=True)  # one of older sources
            errors.append(f"{level}: {getattr(error, 'stderr', None) or error}")
        else:
            raise error
    if not built:
        raise RuntimeError("\n".join(errors))
    return built


def _compile(compiler: list[str], level: str, flags: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for source in sorted(SOURCES.glob("*.c")):
            # The check whether the processor will do must itself run on any.
            about = [f"-DLEGATO_{level.upper()}", f'-DLEGATO_SOURCES="{sources_digest()}"']
            own = about if source.stem == "supported" else flags
            objects.append(str(Path(folder, source.with_suffix(".o").name)))
            _run([*compiler, *COMMON, *own, "-c", str(source), "-o", objects[-1]])
        partial = str(Path(folder, library.name))
        _run([*compiler, "-shared", "-pthread", *objects, "-o", partial, "-lm"])
        os.replace(shutil.copy(partial, f"{library}.{os.getpid()}"), library)  # another process may have it open


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ModuleNotFoundError:  # run by hand
    pass
else:

    class KernelsHook(BuildHookInterface):
        """Hatchling's way to run the above, for wheels and for editable installs."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            if self.target_name != "wheel":
                return
            try:
                libraries = compile_kernels(_compiler(), platform.machine())
            except RuntimeError as error:
                self.app.display_warning(f"Legato is built without its CPU kernels; it will be slower.\n{error}")
                return
            build_data["artifacts"] += [str(library.relative_to(ROOT)) for library in libraries]
            build_data["pure_python"] = False
            # No Python in the libraries: one wheel for all of its versions.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    for path in compile_kernels(sys.argv[1:] or _compiler(), platform.machine()):
        sys.stdout.write(f"{path}\n")
