// Which instruction sets this CPU has. Owns the choice at run time; must not know what the kernels do.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernel_table.h"

namespace phloem {

// Usable here, plainest first; "portable" is always there.
std::vector<std::string> supported_isas();

// Table of `name`, or of the best one for "auto". Throws std::invalid_argument naming what there is.
const KernelTable& kernels_for(const std::string& name);

}  // namespace phloem
