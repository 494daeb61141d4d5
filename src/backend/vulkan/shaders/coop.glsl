/*
 * Cooperative matrices of 16 x 16 x 16. glslc knows GL_NV_cooperative_matrix alone; coop.c turns its instructions into those
 * of SPV_KHR_cooperative_matrix, whose types say how a matrix is used. Here the scope says it: a right factor has another
 * one than a left factor, and sums are of floats.
 */
#extension GL_NV_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#define LEFT  fcoopmatNV<16, gl_ScopeSubgroup, 16, 16>
#define RIGHT fcoopmatNV<16, gl_ScopeQueueFamily, 16, 16>
#define SUM   fcoopmatNV<32, gl_ScopeSubgroup, 16, 16>
