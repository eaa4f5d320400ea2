# SPDX-License-Identifier: Apache-2.0
"""What a machine with a GPU is: the driver, its clocks, and the properties of the device with which cuDNN's plans are made for it
elsewhere."""
import ctypes
import fcntl
import hashlib
import pathlib
import socket
import struct
import subprocess

import build
from place import Failure, say

# The properties that cudnn-frontend's DeviceProperties asks for, by the number of their CUdevice_attribute.
ATTRIBUTES = {
    "regsPerBlock": 12, "multiProcessorCount": 16, "warpSize": 10, "maxSharedMemoryPerBlock": 8, "maxSharedMemoryPerBlockOptin": 97,
    "reservedSharedMemoryPerBlock": 111, "maxRegistersPerSM": 82, "maxCtasPerSM": 106, "maxThreadsPerBlock": 1, "maxThreadsPerSM": 39,
    "pciDeviceId": 34, "isTccDriver": 35, "supportCoopLaunch": 95, "smClockRateKHz": 13, "memClockRateKHz": 36, "l2CacheSize": 38}
TRIPLES = {"maxGridSize": (5, 6, 7), "maxBlockSize": (2, 3, 4)}
LAST_ATTRIBUTE = 160
COMMANDS = {"nvidia-smi": ["nvidia-smi", "-q"], "lscpu": ["lscpu"], "network": ["ip", "a"], "kernel": ["cat", "/proc/version"],
            "libraries": ["ldconfig", "-p"]}


def device_properties():
    """By the driver, as JSON that DeviceProperties::deserialize reads; and every attribute by its number."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, driver, size, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    for error in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0), cuda.cuDriverGetVersion(ctypes.byref(driver)),
                  cuda.cuDeviceGetName(name, len(name), device), cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)):
        if error:
            raise Failure(f"the driver answers with CUDA error {error}")
    value, of = ctypes.c_int(), {}
    for number in range(1, LAST_ATTRIBUTE):
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0:
            of[number] = value.value
    found = {key: of.get(number, 0) for key, number in ATTRIBUTES.items()}
    found.update({key: [of.get(number, 0) for number in numbers] for key, numbers in TRIPLES.items()})
    return {**found, "cudaDeviceId": 0, "deviceVer": 100 * of.get(75, 0) + 10 * of.get(76, 0), "driverVer": driver.value,
            "totalGlobalMem": size.value, "deviceName": name.value.decode(errors="replace")}, of


def bring_up_loopback():
    """Workers meet over it, and a small machine may have left it down."""
    get, put, up = 0x8913, 0x8914, 1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            name, flags = struct.unpack("16sh", fcntl.ioctl(any_socket, get, struct.pack("16sh", b"lo", 0)))
            if not flags & up:
                fcntl.ioctl(any_socket, put, struct.pack("16sh", name, flags | up))
        except OSError:
            pass  # the first run says what is wrong


def changed_files(folder):
    """Those that are not as they were packed."""
    lines = [line.split("  ") for line in (folder / "SHA256SUMS").read_text().splitlines()]
    return [name for sum_, name in lines
            if not (folder / name).exists() or hashlib.sha256((folder / name).read_bytes()).hexdigest() != sum_]


def collect(place):
    for name, command in COMMANDS.items():
        with open(place.out / "data" / f"{name}.log", "w") as log:
            try:
                subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, timeout=10)
            except (OSError, subprocess.TimeoutExpired) as error:
                log.write(f"{command[0]}: {error}\n")
    say({"libraries": build.library_versions(), "changed_files": changed_files(pathlib.Path())})
    try:
        properties, attributes = device_properties()
    except OSError as error:
        if not place.dry:
            raise Failure(f"the driver cannot be asked: {error}") from None
        say({"device_properties": None, "why": str(error)})
        return
    say({"device_properties": properties, "attributes": attributes})
