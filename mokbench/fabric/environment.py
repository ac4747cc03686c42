"""What ranks of the cuda fabric find in their environment; no torch, for the launcher."""

# Set for every worker before torch is imported: a program that uses multicast can put the GPUs of
# a shared host out of service, and one GPU for several ranks has to be allowed explicitly.
CUDA_ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
