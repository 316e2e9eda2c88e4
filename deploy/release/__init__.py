"""Gives a release its names, in all files that state them: `python -m deploy.release`.

images              names and tags of the images, and how they are built
manifests           deploy/kubernetes/, rendered from the Helm chart
"""
