#!/bin/bash
# build.sh DIR: the control plane of Kubernetes 1.20.2 (kube-apiserver, kube-controller-manager, kube-scheduler, kubectl)
# in DIR/bin, from Debian's source package and Debian's Go 1.19, which it unpacks below DIR: nothing is installed.
# 8 minutes on one slow core, 4 of them of CPU, and 2 GB of disk meanwhile; 190 MB stay, and are not made again.
set -euo pipefail
mkdir -p "$1"
cd "$1"
here=$PWD
programs=(kube-apiserver kube-controller-manager kube-scheduler kubectl)
built=yes
for program in "${programs[@]}"; do [ -x "bin/$program" ] || built=; done
[ -z "$built" ] || exit 0

# Lists of their own, as those of most machines have no sources.
# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  awk '$2 == "bookworm" && $3 == "main" && !found++ { print $1 }')
[ -n "$mirror" ] || { echo "build.sh: apt knows no repository of Debian bookworm here" >&2; exit 1; }
mkdir -p lists/partial archives/partial
for kind in deb deb-src; do
  echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main"
done > sources.list
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$here/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$here/lists"
  -o "Dir::Cache::archives=$here/archives" -o APT::Sandbox::User=root)
"${apt[@]}" update
[ -x go/usr/lib/go-1.19/bin/go ] || {
  "${apt[@]}" download golang-1.19-go golang-1.19-src
  for package in golang-1.19-*.deb; do dpkg-deb -x "$package" go; done
}
tree=gopath/src/k8s.io/kubernetes
[ -e "$tree/.unpacked" ] || {
  "${apt[@]}" source --download-only kubernetes=1.20.5+really1.20.2-1.1+deb12u1
  mkdir -p "$tree"
  tar xzf kubernetes_*.orig.tar.gz -C "$tree" --strip-components=1
  touch "$tree/.unpacked"
}

export GOROOT=$here/go/usr/lib/go-1.19 GOPATH=$here/gopath GOCACHE=$here/cache GO111MODULE=off GOTOOLCHAIN=local CGO_ENABLED=0
go=$GOROOT/bin/go
cd "$tree"

# The one generated file that the sources lack: what the API server says of its types.
models=pkg/generated/openapi/zz_generated.openapi.go
[ -s "$models" ] || {
  "$go" build -o "$here/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
  types=$(grep -rl --include='*.go' '+k8s:openapi-gen=' staging/src pkg cmd plugin | grep -v '_test.go$' |
    xargs -n 1 dirname | sed 's,^staging/src/,k8s.io/kubernetes/vendor/,; /^k8s.io/!s,^,k8s.io/kubernetes/,' | sort -u | paste -sd,)
  "$here/openapi-gen" -i "$types" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null --output-base "$here/gopath/src"
}

# Without the clouds' own code, which no test needs.
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
"$go" build -tags providerless -o "$here/bin/" \
  -ldflags "-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20" \
  "${programs[@]/#/./cmd/}"
cd "$here"
rm -rf go gopath cache lists archives openapi-gen sources.list kubernetes_* golang-*
