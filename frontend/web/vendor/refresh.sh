#!/bin/sh
# Copies the libraries of the page from npm, unchanged, at the versions that package.json names; the wheel contains them.
# To update one: change its version in package.json, run this (it needs npm), and run the browser tests.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
npm=$(mktemp -d)
trap 'rm -rf "$npm"' EXIT
cp "$here/package.json" "$npm"
npm install --prefix "$npm" --ignore-scripts --no-audit --no-fund --no-package-lock --omit=dev --silent
cd "$npm/node_modules"

rm -rf "$here/fonts" && mkdir "$here/fonts"
cp markdown-it/dist/browser/markdown-it.esm.min.mjs @highlightjs/cdn-assets/es/highlight.min.js "$here"
cp katex/dist/katex.min.js katex/dist/katex.min.css "$here"
cp katex/dist/fonts/*.woff2 "$here/fonts"  # the style sheet names older formats, too; a browser takes the first it knows

for package in markdown-it entities linkify-it mdurl punycode.js uc.micro @highlightjs/cdn-assets katex; do
    version=$(sed -n 's/^ *"version": "\(.*\)",*$/\1/p' "$package/package.json")
    printf '==== %s %s\n\n' "$package" "$version"
    cat "$package"/LICENSE*
    echo
done > "$here/LICENSES.txt"

cd "$here" && find . -type f ! -name 'SHA256SUMS' ! -name 'refresh.sh' ! -name 'package.json' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum > SHA256SUMS
