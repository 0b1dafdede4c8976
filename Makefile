# `make` prints what there is.

GO ?= go
STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
# Packages whose tests run real servers and processes take turns: they would spoil each other's time.
TESTFLAGS ?= -count=1 -p 1 -timeout 20m

.PHONY: help demo build install test race bench lint fmt fmt-check servers tools

help: ## print this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## play the split brain for real, without and with the fence (about 15 s)
	@$(GO) build -o bin/aegis ./cmd/aegis && bin/aegis demo

build: ## build bin/aegis
	$(GO) build -o bin/aegis ./cmd/aegis

install: ## install the aegis command
	$(GO) install ./cmd/aegis

test: servers ## all tests; they start their own etcd and databases
	@$(GO) build ./... && $(GO) vet ./...
	$(GO) test $(TESTFLAGS) ./...

race: tools servers ## all tests under the race detector
	$(GO) test -race $(TESTFLAGS) -short ./...

bench: ## measure side by side with a bare etcd Put and with peers; prints ratios
	cd bench && $(GO) test -run '^$$' -bench . -benchtime 300x -timeout 30m .

lint: ## vet, staticcheck, and the bench module too
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	cd bench && $(GO) vet ./...

fmt: ## format the code
	gofmt -w .

fmt-check: ## fail where gofmt would change something
	@out=$$(gofmt -l .); test -z "$$out" || { echo "not formatted:"; echo "$$out"; exit 1; }

servers: ## install the database servers that tests start and that are missing (Debian, as root)
	@scripts/install-servers

tools: ## install what the race detector needs and is missing (Debian, as root)
	@command -v gcc >/dev/null || { apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev; }
