# What is installed, and the packages. DESTDIR goes before every path.
PREFIX   ?= /usr/local
LIBDIR   ?= $(PREFIX)/lib
SONAME   := libsteel.so.$(firstword $(subst ., ,$(VERSION)))
SHARED   := libsteel.so.$(VERSION)
PAGES     = $(shell $(RUN) $(B)/steel help --pages)
INSTALL_D = $(DESTDIR)$(PREFIX)
INSTALL_L = $(DESTDIR)$(LIBDIR)

# The shared library exports its interface only, with versioned names.
$(B)/lib/$(SHARED): $(LIB_OBJ) $(CUDA_OBJ) packaging/steel.map
	@mkdir -p $(@D)
	$(Q)$(CC) $(CFLAGS) -shared -Wl,-soname,$(SONAME) -Wl,--version-script=packaging/steel.map -Wl,-z,defs $(LDFLAGS) \
	  -o $@ $(LIB_OBJ) $(CUDA_OBJ) $(LDLIBS)

# Man pages and completions come from the tables of options.
docs-build: $(B)/steel
	@mkdir -p $(B)/man $(B)/completions
	@for p in $(PAGES); do STEEL_CONFIG= $(RUN) $(B)/steel help --man $$(echo $$p | sed 's/^steel//; s/-/ /g') > $(B)/man/$$p.1 || exit 1; done
	@for s in bash zsh fish; do STEEL_CONFIG= $(RUN) $(B)/steel completion $$s > $(B)/completions/$$s || exit 1; done

install: install-program install-library ## into PREFIX (default /usr/local)
install-program: all docs-build
	install -D -m 755 $(B)/steel $(INSTALL_D)/bin/steel
	$(if $(MPICC),install -D -m 755 $(B)/steel-mpi.so $(INSTALL_L)/steel/steel-mpi.so)
	$(if $(STRIP),$(TOOL)strip $(INSTALL_D)/bin/steel)
	install -D -m 644 -t $(INSTALL_D)/share/man/man1 $(patsubst %,$(B)/man/%.1,$(PAGES))
	install -D -m 644 $(B)/completions/bash $(INSTALL_D)/share/bash-completion/completions/steel
	install -D -m 644 $(B)/completions/zsh $(INSTALL_D)/share/zsh/site-functions/_steel
	install -D -m 644 $(B)/completions/fish $(INSTALL_D)/share/fish/vendor_completions.d/steel.fish
	@mkdir -p $(INSTALL_L)/systemd/system
	sed 's|@BINDIR@|$(PREFIX)/bin|' packaging/steel.service.in > $(INSTALL_L)/systemd/system/steel.service
install-library: $(B)/lib/libsteel.a $(B)/lib/$(SHARED)
	install -D -m 644 $(B)/lib/libsteel.a $(INSTALL_L)/libsteel.a
	install -D -m 755 $(B)/lib/$(SHARED) $(INSTALL_L)/$(SHARED)
	ln -sf $(SHARED) $(INSTALL_L)/$(SONAME)
	ln -sf $(SONAME) $(INSTALL_L)/libsteel.so
	install -D -m 644 include/steel.h $(INSTALL_D)/include/steel.h
	@mkdir -p $(INSTALL_L)/pkgconfig
	sed 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|; s|@VERSION@|$(VERSION)|; s|@PRIVATE@|$(LDLIBS) -pthread|' packaging/steel.pc.in > $(INSTALL_L)/pkgconfig/steel.pc
	$(if $(DESTDIR),,$(if $(filter /usr/lib /usr/local/lib,$(LIBDIR)),-ldconfig))

uninstall: ## removes what install has installed
	rm -f $(INSTALL_L)/steel/steel-mpi.so
	-rmdir $(INSTALL_L)/steel 2>/dev/null
	rm -f $(INSTALL_D)/bin/steel $(INSTALL_D)/include/steel.h $(INSTALL_L)/libsteel.a $(INSTALL_L)/libsteel.so* \
	  $(INSTALL_L)/pkgconfig/steel.pc $(INSTALL_L)/systemd/system/steel.service \
	  $(INSTALL_D)/share/man/man1/steel.1* $(INSTALL_D)/share/man/man1/steel-*.1* \
	  $(INSTALL_D)/share/bash-completion/completions/steel $(INSTALL_D)/share/zsh/site-functions/_steel \
	  $(INSTALL_D)/share/fish/vendor_completions.d/steel.fish

# Only libc and the GPU's driver are not inside. With CROSS: for the other architecture.
DIST_B   := build-dist$(CROSS:%=-%)
DIST_OUT := dist/steel$(if $(CROSS),-$(ARCH))
DEB_ARCH  = $(if $(filter aarch64,$(ARCH)),arm64,$(shell dpkg --print-architecture))
dist: ## dist/steel: one binary for other machines
	$(Q)$(MAKE) --no-print-directory B=$(DIST_B) DIST=1 STATIC=1 $(DIST_B)/steel
	@mkdir -p dist && cp $(DIST_B)/steel $(DIST_OUT) && $(TOOL)strip $(DIST_OUT)
	@size=$$(stat -c %s $(DIST_OUT)); echo "$(DIST_OUT): $$((size / 1000000)) MB, version $(VERSION)"; [ $$size -lt 40000000 ]
deb: ## a Debian package
	$(Q)rm -rf $(DIST_B)/deb
	$(Q)$(MAKE) --no-print-directory B=$(DIST_B) DIST=1 STATIC=1 STRIP=1 MPICC= DESTDIR=$(DIST_B)/deb PREFIX=/usr install-program
	@mkdir -p dist && OBJDUMP=$(TOOL)objdump sh packaging/deb.sh $(DIST_B)/deb $(VERSION) $(DEB_ARCH) dist/steel-llm_$(VERSION)_$(DEB_ARCH).deb
