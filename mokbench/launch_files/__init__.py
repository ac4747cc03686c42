"""Files that start mokbench on a cluster: an sbatch script, torchrun lines, a Kubernetes job.

Each is text made from a Job and nothing else; mokbench/launch_command.py prints or submits it.
"""
