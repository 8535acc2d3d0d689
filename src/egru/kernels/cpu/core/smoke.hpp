#pragma once

#include "levels.hpp"

namespace egru {

struct SmokeTable {
    double (*sum)(const double* values, long count);
};

}  // namespace egru

EGRU_DECLARE_TABLE(egru::SmokeTable, smoke_table)
