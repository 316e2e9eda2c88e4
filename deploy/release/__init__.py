"""Writes version and image names of a release into all files that state them: `python -m deploy.release`.

images              names and tags of the images, and how they are built
manifests           deploy/kubernetes/, rendered from the Helm chart
"""
