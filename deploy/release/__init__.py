"""What a release is named, and the files that say so: `python -m deploy.release`.

images              names and tags of the images, and how they are built
manifests           deploy/kubernetes/, rendered from the Helm chart
"""
