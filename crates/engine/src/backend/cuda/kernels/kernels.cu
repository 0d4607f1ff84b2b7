// All kernels as one compilation unit.
#include "kernels.h"

#include "decode.cu"
#include "linear.cu"
#include "prefill.cu"
#include "rows.cu"
#include "sample.cu"
