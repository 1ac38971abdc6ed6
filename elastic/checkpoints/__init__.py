"""What durable checkpoints are, without torch: names, manifests, which one to use, which ones to keep, where they lie.

    ROOT/<series>/<entry>/      series: `_periodic`, or the name of a job.save; entry: see naming.py
        part-00000-of-00003.safetensors   the first of three members' share of the tensors, a valid safetensors file
        part-00000-of-00003.json          what that member wrote: it says so to the others
        files/<name>                      what on_checkpoint hooks have left
        manifest.json                     written last, atomically; an entry without it is no checkpoint

`runtime/checkpoint` writes and reads the tensors.
"""
