# The commands of the project. Everything after the set-up runs without network. Targets without a line in `make help`
# are for its developers (CONTRIBUTING.md).

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# cpu or cuda; not given: cuda where there is an NVIDIA GPU.
TARGET ?=
# What `make setup` installs beside the project's own: dev, try, llamacpp, vllm.
EXTRAS ?=
# The task of demo, run, compare and report, a folder of stages/tasks.
TASK ?= detection
# Inputs of compare: experiments, branches, tags or commits of DVC and git; none for all of HEAD that compare.
EXPERIMENTS ?=
OVER ?=
# docker, podman or apptainer, for images; not given: the first of them that there is.
ENGINE ?=
# Passed on to pytest: make test ARGS="-k lineage -x"
ARGS ?=

python := .venv/bin/python
# A value as one word of the shell, whatever is in it.
quote = '$(subst ','\'',$(1))'
# --NAME VALUE; nothing for an empty value.
option = $(if $(2),--$(1) $(call quote,$(2)))

# Relative above and quoted here: the workspace may lie in a folder with a space in its name.
export TARGET
export ENGINE
export VIRTUAL_ENV := $(CURDIR)/.venv
export DVC_NO_ANALYTICS := 1
# An interpreter that may not keep its byte code compiles torch and transformers again in every process.
unexport PYTHONDONTWRITEBYTECODE
# Waiting threads yield; busy-waiting made shared machines 10x slower.
export OMP_WAIT_POLICY := PASSIVE
unexport PYTHONPATH

offline := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1

.PHONY: help
help: ## List these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r name text; do \
		printf '  make %-12s %s\n' "$$name" "$$text"; done

.PHONY: setup
setup: ## Create .venv with the locked packages (TARGET=cpu|cuda, EXTRAS="dev try llamacpp vllm", PYTHON=...)
	@docker/setup $(EXTRAS)

.PHONY: setup-dev
setup-dev:
	@docker/setup dev $(filter-out dev,$(EXTRAS))

# TARGET is that of an image: .venv stays what it is, and says which image is made where none is asked for.
.PHONY: setup-tools
setup-tools:
	@TARGET= docker/setup

.PHONY: image
image: setup-tools ## Build the image that stages run in (TARGET=cpu|cuda|vllm, ENGINE=docker|podman|apptainer)
	@TARGET="$${TARGET:-$$(cat .venv/.bakeoff/target)}" $(python) -m tools.image

tasks := $(patsubst stages/tasks/%/report.py,%,$(wildcard stages/tasks/*/report.py))
report = data/report/$(TASK)
check_task = $(if $(and $(filter 1,$(words $(TASK))),$(filter $(TASK),$(tasks))),,$(error no task is called $(TASK); there are: $(tasks)))

run_stages = $(python) -m tools.run compare@$(TASK) $(call option,profile,$(PROFILE))

.PHONY: demo
demo: setup ## Run a task's recipes at tiny size on the CPU and print the comparison (TASK=, a folder of stages/tasks; PROFILE=)
	@$(check_task)
	@$(if $(PROFILE),,$(offline)) $(run_stages)
	@cat $(report)/table.txt
	@$(if $(PROFILE),,cmp -s $(report)/table.txt docs/tables/$(TASK).txt && echo 'This is the published table (docs/tables), to the digit.' || \
		echo 'This is not the published table, which a CPU of another maker may have computed (docs/verification.md): diff $(report)/table.txt docs/tables/$(TASK).txt')

.PHONY: run
run: setup ## Run a task's stages side by side, on several GPUs or cores (TASK=, PROFILE=, JOBS=4, ARGS=-f)
	@$(check_task)
	@$(run_stages) $(call option,jobs,$(JOBS)) $(ARGS)
	@cat $(report)/table.txt

.PHONY: data
data: setup ## Show a dataset, and a sample as its model sees it (DATASET=, RECIPE=, PROFILE=; or SOURCE=folder of images or conversations, FORMAT=)
	@$(if $(filter-out hub:%,$(SOURCE)),$(offline)) $(python) -m tools.data $(if $(SOURCE),$(call quote,$(SOURCE))) $(call option,dataset,$(DATASET)) $(call option,recipe,$(RECIPE)) $(call option,profile,$(PROFILE)) $(call option,format,$(FORMAT))

# Options that are not given are left out: a recipe, a profile, one GPU or several.
plan_options = $(if $(RECIPE),$(call quote,$(RECIPE))) $(call option,profile,$(PROFILE)) $(if $(filter-out 0,$(ALL)),--all) \
	$(call option,gpu,$(GPU)) $(if $(filter-out 0,$(JSON)),--json) \
	$(call option,set,$(SET))

.PHONY: plan
plan: setup ## Predict a recipe's memory and time, on a GPU without one (RECIPE=, PROFILE=, GPU=24|"RTX 3090", SET=, JSON=1; ALL=1)
	@$(offline) $(python) -m tools.plan $(plan_options)

.PHONY: try
try: setup ## Open a page that asks a trained model and its base, after make setup EXTRAS=try (RUN=r4-joint, ALONE=1, PORT=)
	@$(offline) $(python) -m tools.try_run $(call quote,$(or $(RUN),$(error which run? make try RUN=r4-joint))) \
		$(if $(filter-out 0,$(ALONE)),--alone) $(call option,port,$(PORT))

.PHONY: serve
serve: setup ## Serve a run that has vLLM's certificate, on loopback, after make setup EXTRAS=vllm (RUN=, PORT=8000)
	@$(if $(RUN),,$(error which run? make serve RUN=r4-joint))
	@$(offline) $(python) -m tools.serve $(call quote,$(RUN)) $(call option,port,$(PORT))

.PHONY: verify
verify: setup ## Read every output back and compare; RERUN=STAGE: run it again and compare (STEPS=, SAMPLES=, KEEP=1; PUBLISHED=FOLDER, KEY=)
	@$(python) -m tools.verify $(call option,rerun,$(RERUN)) \
		$(call option,steps,$(STEPS)) $(call option,samples,$(SAMPLES)) $(if $(filter-out 0,$(KEEP)),--keep) \
		$(call option,published,$(PUBLISHED)) $(call option,key,$(KEY))

.PHONY: publish
publish: setup ## Write a run or an export as a folder to publish, data/published/RUN; SEND=1 uploads it (RUN=, TO=OWNER/NAME)
	@$(if $(RUN),,$(error which run? make publish RUN=r4-joint))
	@$(offline) $(python) -m tools.publish $(call quote,$(RUN))
	@$(if $(filter-out 0,$(SEND)),$(python) -m tools.send $(call quote,data/published/$(RUN)) $(call quote,$(or $(TO),$(error where to? TO=OWNER/NAME))),\
		echo $(call quote,Look at data/published/$(RUN)/README.md. Nothing was sent; that does: make publish RUN=$(RUN) TO=OWNER/NAME SEND=1))

.PHONY: compare
compare: ## Compare recipes over all seeds (TASK=; EXPERIMENTS=, OVER='recipes.*.learning_rate', RACE=0.03: train to the best)
	@$(python) -m tools.compare $(TASK) $(EXPERIMENTS) $(call option,over,$(OVER)) \
		$(call option,race,$(RACE)) $(call option,jobs,$(JOBS))

.PHONY: report
report: ## Open the last comparison in a browser (TASK=)
	@$(check_task)
	@test -f $(report)/index.html || { echo 'there is no report of $(TASK); run: dvc repro compare@$(TASK); or, if a remote has the results: dvc pull --with-deps compare@$(TASK)'; exit 1; }
	@echo $(call quote,$(CURDIR)/$(report)/index.html)
	@$(python) -m webbrowser $(call quote,file://$(CURDIR)/$(report)/index.html) > /dev/null

# Test files run in parallel: one process more than there are cores, because tests also wait; at most 4, because each
# imports torch. One at a time: ARGS="-n 0".
in_parallel := -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
# Processes that share the cores compute with one thread each: with two, small models take half as long again.
one_thread := OMP_NUM_THREADS=1
smoke_dir := build/smoke-$(or $(ENGINE),auto)

.PHONY: test
test: setup-dev ## Run the tests (ARGS="-k name" for some of them)
	@$(offline) $(one_thread) $(python) -m pytest $(in_parallel) $(ARGS)

# Tests that neither train nor starts containers, DVC or many processes.
quick := core reporting tasks data evaluation planning \
	$(addsuffix .py,test_compare test_docs test_imports test_locks test_pipeline)

# Run the tests that take no training, for the inner loop
.PHONY: test-quick
test-quick: setup-dev
	@$(offline) $(one_thread) $(python) -m pytest -m "not pipeline and not engine and not vllm" $(in_parallel) $(addprefix tests/,$(quick)) $(ARGS)

# Test vLLM itself on a CPU: equal completions, and a model that it is refused for
.PHONY: test-vllm
test-vllm:
	@docker/setup dev vllm
	@$(offline) $(python) -m pytest -m vllm -n 0 tests/evaluation $(ARGS)

.PHONY: gpu
gpu: setup-dev ## Measure what only a GPU can show: memory and speed against predictions, resume (ARGS="-k training")
	@$(offline) $(python) -m pytest -m gpu -n 0 -v tests/gpu $(ARGS)

# Time the faster ways against what they replace, on this CPU
.PHONY: bench
bench: setup
	@$(offline) $(python) -m tests.benchmarks.speed

# Its own Python stays as it is: TARGET is that of the image, and only cpu's can be tried anywhere.
# Run a pipeline in real containers, and try to break out of one (ENGINE=docker|podman|apptainer)
.PHONY: smoke
smoke: setup-dev
	@TARGET=cpu $(python) -m tools.image
	@mkdir -p build
	@$(offline) $(one_thread) $(python) -m pytest -m engine $(in_parallel) --basetemp $(smoke_dir) tests/smoke $(ARGS)

# Check style, format and which part may import which
.PHONY: lint
lint: setup-dev
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@PYTHONPATH=. $(python) .venv/bin/lint-imports

# Fix what the linter can fix itself
.PHONY: format
format: setup-dev
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

# Check the types
.PHONY: types
types: setup-dev
	@$(python) -m mypy

# Resolve pyproject.toml into docker/*.lock (needs a package index)
.PHONY: lock
lock: setup
	@docker/lock

# Remove results and tool caches; .venv and DVC's cache stay
.PHONY: clean
clean:
	rm -rf data/bases data/builds data/exports data/guards/*/ data/prepared data/runs data/predictions data/provenance data/published data/report
	rm -rf .bakeoff/checkpoints .bakeoff/logs .bakeoff/stages .bakeoff/triton .bakeoff/verify
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	find stages tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# Remove .venv and DVC's cache too: every experiment's files
.PHONY: distclean
distclean: clean
	rm -rf .venv .bakeoff .dvc/cache .dvc/tmp
